#include "verify/suites/model_suite.h"

#include "base/error.h"
#include "comm/random_streams.h"
#include "verify/dtype.h"
#include "verify/suites/draw.h"

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

std::vector<MeshMode> suite_meshes(const CaseFilter& filter) {
  std::vector<MeshMode> all = {{{1, 1, 2}},
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
  for (const int sp : filter.wanted_sp()) {
    if (sp == 2 || sp == 3 || sp == 4 || sp == 8) continue;
    for (int ring = 1; ring <= sp; ++ring) {
      if (sp % ring == 0) all.push_back({{1, ring, sp / ring}});
    }
  }
  return all;
}

bool joint(const ModelCase& c) { return c.subject != "wan"; }
bool masked(const ModelCase& c) { return c.subject.starts_with("qwenimage"); }

// Whatever ulysses does not divide must be padded or cut unevenly.
void split_heads(ModelCase& c, bool padded) {
  if (c.heads % c.mesh.ulysses == 0) return;
  c.parallel.head_split =
      padded || c.heads < c.mesh.ulysses ? HeadSplit::kPadded : HeadSplit::kUneven;
}

constexpr int kVariants = 6;

// The variants of the suite; together they hold every feature. Heads that ulysses does not divide
// are padded or cut unevenly.
void dress(ModelCase& c, int variant) {
  switch (variant) {
    case 0:  // even shards as far as the mesh allows
      break;
    case 1:  // text and image that sp does not divide, ragged masks
      c.text = 7;
      c.grid = {c.grid[0], 5, 5};
      c.ragged = masked(c);
      break;
    case 2:  // the same in padded shards, recomputed blocks, dropout
      c.text = 5;
      c.grid = {c.grid[0], 3, 5};
      c.batch = 1;
      c.ragged = masked(c);
      c.recompute = true;
      c.dropout = true;
      c.parallel.token_split = TokenSplit::kPadded;
      break;
    case 3:  // replicated text, adapters, dropout, another gradient convention
      c.text = 7;
      c.lora = true;
      c.dropout = true;
      if (joint(c)) c.parallel.text_placement = StreamPlacement::kReplicated;
      c.parallel.convention = GradientConvention::kSliceThenScaleLoss;
      break;
    case 4:  // text shorter than sp, replicas with data of their own, recomputed adapters, dropout
      c.text = 2;
      c.batch = 1;
      c.lora = true;
      c.recompute = true;
      c.dropout = true;
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
  split_heads(c, variant % 2 == 0);
}

bool admits(const CaseFilter& filter, const ModelCase& c) {
  AttentionCase as_attention;
  as_attention.mesh = c.mesh;
  as_attention.dtype = c.dtype;
  return filter.admits(as_attention);
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
  const std::vector<MeshMode> meshes = suite_meshes(filter);
  for (const std::string& subject : model_subjects()) {
    for (const MeshMode& mode : meshes) {
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
          c.seed = case_seed(seed, number * 100 + static_cast<uint64_t>(variant));
          if (admits(filter, c)) cases.push_back(c);
        }
      }
    }
  }
  return cases;
}

namespace {

void draw_mesh(ModelCase& c, int64_t mode, Draw& draw) {
  const bool ulysses = mode == 0, hybrid = mode >= 3;
  c.parallel.ring_mode = mode == 2 || mode == 4 ? RingMode::kAllGather : RingMode::kRotate;
  c.mesh.ulysses = static_cast<int>(ulysses ? draw.between(2, 8) : hybrid ? draw.between(2, 4) : 1);
  c.mesh.ring = static_cast<int>(ulysses  ? 1
                                 : hybrid ? draw.between(2, 8 / c.mesh.ulysses)
                                          : draw.between(2, 6));
  c.mesh.dp = c.mesh.sp() <= 4 && draw.chance(4) ? 2 : 1;
}

void draw_features(ModelCase& c, Draw& draw) {
  c.batch = draw.between(1, 3);
  // Attention to a single key has no gradient: what is left of it is rounding.
  c.text = draw.between(c.subject == "wan" ? 2 : 1, 10);
  c.grid = {c.subject == "wan" ? draw.between(1, 3) : 1, draw.between(2, 6), draw.between(1, 6)};
  c.layers = draw.between(1, 3);
  c.heads = draw.between(1, 6);
  c.head_dim = 4 * draw.between(2, 5);
  split_heads(c, draw.chance(2));
  if (draw.chance(2)) c.parallel.token_split = TokenSplit::kPadded;
  if (joint(c) && draw.chance(3)) c.parallel.text_placement = StreamPlacement::kReplicated;
  c.ragged = masked(c) && draw.chance(2);
  c.text_aligned = masked(c) && draw.chance(4);
  c.guided = draw.chance(4);
  c.lora = draw.chance(4);
  c.recompute = draw.chance(3);
  c.faithful = c.dtype == at::kFloat && draw.chance(2);
  const int64_t convention = draw.between(0, 2);
  c.parallel.convention = convention == 0   ? GradientConvention::kSliceThenScaleLoss
                          : convention == 1 ? GradientConvention::kSliceTimesSp
                                            : GradientConvention::kSumThenSlice;
  c.dropout = !c.text_aligned && draw.chance(4);
}

}  // namespace

std::vector<ModelCase> random_model_cases(const CaseFilter& filter, uint64_t seed, int64_t count) {
  std::vector<ModelCase> cases;
  Draw draw(comm::derive_seed(seed, 1));
  const auto& subjects = model_subjects();
  const auto& dtypes = all_dtypes();
  for (int64_t i = 0; static_cast<int64_t>(cases.size()) < count; ++i) {
    if (i > 1000 * count) {
      bad_input("no random case fits the options; widen --sp, --ring or --dtype");
    }
    const auto number = static_cast<size_t>(i);
    ModelCase c = base_case(subjects[number % subjects.size()]);
    c.dtype = dtypes[number / subjects.size() % dtypes.size()];
    c.parallel.backend = filter.backend;
    draw_mesh(c, i / static_cast<int64_t>(subjects.size() * dtypes.size()) % 5, draw);
    draw_features(c, draw);
    c.seed = case_seed(seed, number);
    if (admits(filter, c)) cases.push_back(c);
  }
  return cases;
}

std::vector<ModelCase> golden_model_cases(const ModelGolden& golden, const CaseFilter& filter,
                                          bool quick) {
  std::vector<MeshMode> meshes = {{{1, 1, 1}}, {{1, 1, 2}}, {{1, 2, 1}}, {{1, 2, 2}}};
  if (!quick) meshes.insert(meshes.end(), {{{1, 1, 4}}, {{1, 4, 1}}, {{1, 1, 3}}});
  const std::set<int> sizes = filter.wanted_sp();
  if (!sizes.empty()) {
    meshes.clear();
    for (const int sp : sizes) {
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
      if (admits(filter, c)) cases.push_back(c);
    }
  }
  return cases;
}

}  // namespace shardproof::verify
