// Runs a model case: the whole model on one rank, and with sequence parallelism on the ranks of a
// world; forward and backward.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "sim/fault_plan.h"
#include "verify/budget.h"
#include "verify/models/model_data.h"
#include "verify/rank_world.h"
#include "verify/verdict/verdict.h"

namespace shardproof::verify {

// What is under test, with the seams through which mutants enter.
struct ModelSubject {
  sim::FaultPlan faults;
  // Of one rank: how it splits its work, and what it is given.
  std::function<void(models::ParallelOptions&, int world_rank)> edit_options;
  std::function<void(models::TransformerInputs&, int world_rank)> edit_inputs;
  // In place of models::MeshContext.
  std::function<std::unique_ptr<models::ParallelContext>(const comm::Mesh&, models::ParallelOptions,
                                                         int world_rank)>
      make_context;
  Observer observe;  // told what is judged; may be empty
};

// Whole tensors by name: block.<i>.hidden_states, block.<i>.encoder_hidden_states, output,
// <parameter>:grad, <input>:grad; of further passes with the pass's prefix.
using ModelTensors = std::map<std::string, at::Tensor>;

// All samples at once, without sequence parallelism, computed in `dtype`. `magnitudes`, if not
// null, gets the size of what adds up to the gradients of timestep and guidance, which cancels.
ModelTensors run_whole_model(const ModelCase& c, const ModelData& data, at::ScalarType dtype,
                             models::DtypePolicy policy, at::Device device,
                             ModelTensors* magnitudes = nullptr);

struct ModelRun {
  ModelTensors tensors;
  std::vector<CheckResult> checks;  // coverage, trace, and what ended the run
  bool completed = true;
};

// `world` must have c.mesh.world() ranks.
ModelRun run_parallel_model(const ModelCase& c, const ModelData& data, const ModelSubject& subject,
                            RankWorld& world);

// The ownership of tokens in the model's attention, as a case of attention.
AttentionCase attention_of(const ModelCase& c, const ModelData& data);

// The sum that a rank's collectives must add up to: each block talks in forward and backward, and a
// recomputed block issues the forward's calls again, in the same order.
CheckResult check_model_trace(const ModelCase& c, const RankWorld& world);

}  // namespace shardproof::verify
