// Runs an attention case twice: without sequence parallelism, and on the ranks of a world.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

#include "attention/sequence_parallel.h"
#include "sim/fault_plan.h"
#include "verify/attention/attention_data.h"
#include "verify/budget.h"
#include "verify/rank_world.h"
#include "verify/verdict/verdict.h"

namespace shardproof::verify {

// Whole tensors in joint order: out, dq [B,S,H,D], dk, dv [B,S,Hk,D], lse [B,H,S].
struct AttentionTensors {
  at::Tensor out, lse, dq, dk, dv;
};

// What is under test, with the seams through which mutants enter. The default is the product.
struct AttentionSubject {
  using Local = std::shared_ptr<const attention::LocalAttention>;
  std::function<void(plan::AttentionPlan&)> edit_plan;
  std::function<Local(Local, int world_rank)> wrap_local;
  // What a rank gives to its attention; gradients are those of what was given before.
  std::function<attention::StreamQkv(const attention::StreamQkv&, int world_rank)> edit_inputs;
  attention::MergeFunction merge = attention::merge_block;
  sim::FaultPlan faults;
  Observer observe;  // told what is judged; may be empty
};

// Non-SP attention by the same local backend. The tokens are computed in the order in which the
// ranks hold them (rank-major), since the order of a sum decides its bits.
AttentionTensors run_whole(const AttentionCase& c, const AttentionData& data, at::Device device);

struct SequenceParallelRun {
  AttentionTensors tensors;         // NaN where no rank delivered anything
  std::vector<CheckResult> checks;  // coverage, trace, and what ended the run (race, deadlock, ...)
  bool completed = true;
};

// `world` must have c.mesh.world() ranks. Pads hold NaN, as do masked keys and values.
SequenceParallelRun run_sequence_parallel(const AttentionCase& c, const AttentionData& data,
                                          const AttentionSubject& subject, RankWorld& world);

}  // namespace shardproof::verify
