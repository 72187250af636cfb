#include "verify/suites/training_suite.h"

#include "verify/dtype.h"
#include "verify/suites/covering_array.h"
#include "verify/suites/draw.h"

namespace shardproof::verify {
namespace {

using plan::GradientConvention;

struct TrainingMesh {
  comm::MeshShape mesh;
  int shards;
  plan::RingMode ring_mode = plan::RingMode::kRotate;
};

std::vector<TrainingMesh> suite_meshes() {
  constexpr auto kGather = plan::RingMode::kAllGather;
  return {{{2, 1, 1}, 2}, {{1, 1, 2}, 2}, {{1, 2, 1}, 2}, {{2, 1, 1}, 1},
          {{1, 1, 3}, 3}, {{3, 1, 1}, 3}, {{2, 1, 2}, 4}, {{2, 1, 2}, 2},
          {{1, 2, 2}, 4}, {{4, 1, 1}, 2}, {{1, 1, 4}, 4}, {{2, 2, 1}, 4, kGather},
          {{2, 2, 2}, 8}, {{4, 1, 2}, 2}, {{2, 1, 4}, 8}, {{2, 2, 2}, 4}};
}

// Factors of the array, in this order.
enum Factor {
  kSubject,
  kMesh,
  kDtype,
  kAccumulation,
  kLoss,
  kConvention,
  kSgd,
  kClip,
  kLora,
  kRecompute,
  kDropout,
  kGuided,
  kReplicated,
  kResharding,
  kStop,
  kTokens,
  kFactors
};

const std::vector<int>& dtype_weights() {  // fp64 in two cases of five
  static const std::vector<int> dtypes = {0, 0, 1, 2, 3};
  return dtypes;
}

std::vector<int> levels(size_t meshes) {
  std::vector<int> all(kFactors, 2);
  all[kSubject] = static_cast<int>(model_subjects().size());
  all[kMesh] = static_cast<int>(meshes);
  all[kDtype] = static_cast<int>(dtype_weights().size());
  all[kAccumulation] = 5;
  all[kLoss] = all[kConvention] = all[kResharding] = all[kTokens] = 3;
  return all;
}

bool allowed(const Combination& c) {
  const bool per_rank = c[kLoss] == static_cast<int>(TrainingLoss::kPerRank);
  return !per_rank || c[kConvention] == static_cast<int>(GradientConvention::kSumThenSlice);
}

// Tokens that sp divides, that it does not, and the latter in padded shards.
void split_tokens(ModelCase& c, int way) {
  if (way == 0) return;
  c.text = 5;
  c.grid = {c.grid[0], 3, 5};
  c.ragged = c.subject.starts_with("qwenimage");
  if (way == 2) c.parallel.token_split = plan::TokenSplit::kPadded;
}

TrainingCase make_case(const Combination& row, const TrainingMesh& mesh, bool quick) {
  const std::string subject = model_subjects()[static_cast<size_t>(row[kSubject])];
  TrainingCase c;
  c.model = ModelCase::parse("models/" + subject + "/local/dp1.ring1.ulysses1/fp64/default");
  c.model.mesh = mesh.mesh;
  c.model.parallel.ring_mode = mesh.ring_mode;
  c.shards = mesh.shards;
  c.model.dtype =
      all_dtypes()[static_cast<size_t>(dtype_weights()[static_cast<size_t>(row[kDtype])])];
  c.model.layers = 2;
  c.model.heads = 4;
  c.model.batch = 1;
  c.model.text = 8;
  c.steps = !quick && c.model.dtype == c10::ScalarType::Double ? 5 : 2;
  constexpr int kAccumulations[] = {1, 3, 4, 3, 4};
  c.accumulation = kAccumulations[row[kAccumulation]];
  c.deferred = row[kAccumulation] >= 3;
  c.loss = static_cast<TrainingLoss>(row[kLoss]);
  c.model.parallel.convention = static_cast<GradientConvention>(row[kConvention]);
  c.sgd = row[kSgd] == 1;
  c.clip = row[kClip] == 1;
  c.model.lora = row[kLora] == 1;
  c.model.recompute = row[kRecompute] == 1;
  c.model.dropout = row[kDropout] == 1;
  c.model.guided = row[kGuided] == 1;
  c.replicated = row[kReplicated] == 1;
  c.keep = row[kResharding] == 1;
  c.no_prefetch = row[kResharding] == 2;
  c.stop = row[kStop] == 1;
  // No factor of its own: it changes no number.
  c.offload = row[kStop] == 0 && row[kClip] == 1;
  split_tokens(c.model, row[kTokens]);
  if (c.model.heads % mesh.mesh.ulysses != 0)
    c.model.parallel.head_split = plan::HeadSplit::kPadded;
  return c;
}

}  // namespace

std::vector<TrainingCase> training_suite(const CaseFilter& filter, uint64_t seed, bool quick) {
  std::vector<TrainingMesh> meshes;
  for (const TrainingMesh& mesh : suite_meshes()) {
    AttentionCase as_attention;
    as_attention.mesh = mesh.mesh;
    CaseFilter any_dtype = filter;
    any_dtype.dtypes.clear();
    if (any_dtype.admits(as_attention)) meshes.push_back(mesh);
  }
  std::vector<TrainingCase> cases;
  if (meshes.empty()) return cases;
  for (const Combination& row : covering_array(levels(meshes.size()), quick ? 1 : 2, allowed)) {
    TrainingCase c = make_case(row, meshes[static_cast<size_t>(row[kMesh])], quick);
    c.model.parallel.backend = filter.backend;
    c.model.seed = case_seed(seed, 7000 + cases.size());
    AttentionCase as_attention;
    as_attention.mesh = c.model.mesh;
    as_attention.dtype = c.model.dtype;
    if (filter.admits(as_attention)) cases.push_back(c);
  }
  return cases;
}

}  // namespace shardproof::verify
