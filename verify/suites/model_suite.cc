#include "verify/suites/model_suite.h"

#include "comm/random_streams.h"
#include "verify/dtype.h"

namespace shardproof::verify {
namespace {

using plan::GradientConvention;
using plan::HeadSplit;
using plan::RingMode;
using plan::StreamPlacement;
using plan::TokenSplit;

struct MeshMode {
  comm::MeshShape mesh;
  RingMode ring_mode = RingMode::kRotate;
};

const std::vector<MeshMode>& suite_meshes() {
  static const std::vector<MeshMode> all = {{{1, 1, 2}},
                                            {{1, 1, 3}},
                                            {{1, 1, 4}},
                                            {{1, 1, 8}},
                                            {{1, 2, 1}},
                                            {{1, 3, 1}},
                                            {{1, 4, 1}},
                                            {{1, 2, 2}},
                                            {{1, 2, 4}},
                                            {{1, 2, 1}, RingMode::kAllGather},
                                            {{1, 2, 2}, RingMode::kAllGather}};
  return all;
}

bool joint(const ModelCase& c) { return c.subject != "wan"; }
bool masked(const ModelCase& c) { return c.subject.starts_with("qwenimage"); }

constexpr int kVariants = 6;

// The variants of the suite; together they hold every feature. Heads that ulysses does not divide
// are padded or cut unevenly.
void dress(ModelCase& c, int variant) {
  const int u = c.mesh.ulysses;
  switch (variant) {
    case 0:  // even shards as far as the mesh allows
      break;
    case 1:  // text and image that sp does not divide, ragged masks
      c.text = 7;
      c.grid = {c.grid[0], 5, 5};
      c.ragged = masked(c);
      break;
    case 2:  // the same in padded shards, recomputed blocks
      c.text = 5;
      c.grid = {c.grid[0], 3, 5};
      c.batch = 1;
      c.ragged = masked(c);
      c.recompute = true;
      c.parallel.token_split = TokenSplit::kPadded;
      break;
    case 3:  // replicated text, adapters, another gradient convention
      c.text = 7;
      c.lora = true;
      if (joint(c)) c.parallel.text_placement = StreamPlacement::kReplicated;
      c.parallel.convention = GradientConvention::kSliceThenScaleLoss;
      break;
    case 4:  // text shorter than sp, replicas with data of their own, recomputed adapters
      c.text = 2;
      c.batch = 1;
      c.lora = true;
      c.recompute = true;
      if (c.mesh.sp() <= 4) c.mesh.dp = 2;
      c.parallel.convention = GradientConvention::kSliceTimesSp;
      break;
    default:  // guidance: two passes; text padded to a multiple of sp where it can be masked
      c.text = 5;
      c.guided = true;
      c.batch = 1;
      c.text_aligned = masked(c);
      c.ragged = masked(c);
  }
  if (c.heads % u != 0) {
    c.parallel.head_split =
        variant % 2 == 0 || c.heads < u ? HeadSplit::kPadded : HeadSplit::kUneven;
  }
}

ModelCase base_case(const std::string& subject) {
  ModelCase c = ModelCase::parse("models/" + subject + "/local/dp1.ring1.ulysses1/fp64/default");
  c.layers = 2;
  c.heads = 4;
  return c;
}

}  // namespace

std::vector<ModelCase> model_suite(const CaseFilter& filter, uint64_t seed, bool quick) {
  std::vector<ModelCase> cases;
  uint64_t number = 0;
  for (const std::string& subject : model_subjects()) {
    for (const MeshMode& mode : suite_meshes()) {
      ++number;
      for (size_t d = 0; d < all_dtypes().size(); ++d) {
        for (int variant = 0; variant < kVariants; ++variant) {
          // Latin squares: over models and meshes each dtype meets each variant.
          const bool chosen = static_cast<int>(number + d) % kVariants == variant;
          if ((quick || d > 0) && !chosen) continue;
          if (quick && (number / 2 + d) % 2 != 0) continue;
          ModelCase c = base_case(subject);
          c.mesh = mode.mesh;
          c.parallel.ring_mode = mode.ring_mode;
          c.parallel.backend = filter.backend;
          c.dtype = all_dtypes()[d];
          dress(c, variant);
          c.seed =
              comm::derive_seed(seed * 1000003 + number * 100 + static_cast<uint64_t>(variant), 0) %
              1000000;
          AttentionCase as_attention;
          as_attention.mesh = c.mesh;
          as_attention.dtype = c.dtype;
          if (filter.admits(as_attention)) cases.push_back(c);
        }
      }
    }
  }
  return cases;
}

std::vector<ModelCase> golden_model_cases(const ModelGolden& golden, const CaseFilter& filter,
                                          bool quick) {
  std::vector<MeshMode> meshes = {{{1, 1, 1}}, {{1, 1, 2}}, {{1, 2, 1}}, {{1, 2, 2}}};
  if (!quick) meshes.insert(meshes.end(), {{{1, 1, 4}}, {{1, 4, 1}}, {{1, 1, 3}}});
  if (!filter.sp.empty()) {
    meshes.clear();
    for (const int sp : filter.sp) {
      for (int ring = 1; ring <= sp; ++ring) {
        if (sp % ring == 0) meshes.push_back({{1, ring, sp / ring}});
      }
    }
  }
  std::vector<ModelCase> cases;
  for (const MeshMode& mode : meshes) {
    for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
      ModelCase c;
      c.suite = "goldens";
      c.subject = golden.name;
      c.mesh = mode.mesh;
      c.dtype = dtype;
      c.batch = golden.inputs.hidden_states.size(0);
      c.text = golden.text_tokens;
      c.grid = {1, 1, golden.image_tokens};
      c.heads = golden.heads;
      c.ragged = golden.inputs.encoder_hidden_states_mask.defined();
      c.parallel.backend = filter.backend;
      if (c.heads % c.mesh.ulysses != 0) c.parallel.head_split = HeadSplit::kPadded;
      AttentionCase as_attention;
      as_attention.mesh = c.mesh;
      as_attention.dtype = c.dtype;
      if (filter.admits(as_attention)) cases.push_back(c);
    }
  }
  return cases;
}

}  // namespace shardproof::verify
