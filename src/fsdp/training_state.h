// All that a training run must keep to go on as if it had not stopped.
#pragma once
#include <filesystem>

#include "comm/random_streams.h"
#include "fsdp/checkpoint.h"
#include "fsdp/fully_sharded.h"
#include "fsdp/moving_average.h"
#include "fsdp/optimizer.h"

namespace shardproof::fsdp {

// The parts of a run; `average` and `random` may be null.
struct TrainingState {
  FullySharded& sharded;
  Optimizer& optimizer;
  MovingAverage* average = nullptr;
  comm::RandomStreams* random = nullptr;
};

// Under which a checkpoint's numbers say the scale (alpha / rank) of the adapters in it.
inline constexpr const char* kAdapterScaleNumber = "adapter_scale";

// Trained parameters, the optimizer's state, averages and random streams. Frozen parameters and
// buffers are those of the model's own folder and not saved again. `info`: model, mesh, seed, step;
// counters are added. Collective. Errors: see save_checkpoint.
void save_training(const std::filesystem::path& folder, CheckpointInfo info,
                   const TrainingState& state, const comm::FsdpMesh& mesh);

// On any number of ranks. On the same mesh the run goes on to the bit; on another one the random
// streams start anew. Returns what was saved. Collective. Errors: see load_checkpoint; nothing is
// changed then.
CheckpointInfo resume_training(const std::filesystem::path& folder, const CheckpointInfo& expected,
                               const TrainingState& state, const comm::FsdpMesh& mesh);

}  // namespace shardproof::fsdp
