// One optimizer step over micro-batches: the factors of the loss, the exchange of gradients, the
// norm, clipping, and the decision to skip, in one place.
#pragma once
#include <cstdint>
#include <functional>
#include <limits>

#include "comm/mesh.h"
#include "fsdp/fully_sharded.h"
#include "fsdp/gradient_norm.h"
#include "fsdp/moving_average.h"
#include "fsdp/optimizer.h"
#include "plan/attention_plan.h"

namespace shardproof::fsdp {

struct StepOptions {
  int micro_batches = 1;
  // Gradients are exchanged in the last micro-batch only (see FullySharded::backward).
  bool deferred_sync = false;
  double max_norm = std::numeric_limits<double>::infinity();
  double learning_rate = 1e-3;
  // Of the output's gather, see plan::GradientConvention. A's backward takes the rank's own slice
  // of the cotangent, 1/sp of what the mean over sp ranks needs: the loss is multiplied by sp, here
  // and nowhere else.
  plan::GradientConvention convention = plan::GradientConvention::kSumThenSlice;
  // What measures the gradients; others than gradient_norm serve to plant faults. The ranks must
  // agree on whether it is finite.
  std::function<double(const std::vector<TrainedTensor>&, const comm::FsdpMesh&)> norm =
      [](const std::vector<TrainedTensor>& tensors, const comm::FsdpMesh& mesh) {
        return gradient_norm(tensors, mesh.shards(), mesh.device());
      };
  // Told the gradients before they are clipped.
  std::function<void(const std::vector<TrainedTensor>&)> probe;
};

struct StepReport {
  double loss = 0;       // mean over ranks (SP ranks of a replica have the same) and micro-batches
  double grad_norm = 0;  // before clipping
  bool skipped = false;  // the norm was not finite: nothing has changed
};

// This rank's loss of a micro-batch: its forward, a scalar.
using MicroLoss = std::function<at::Tensor(int micro_batch)>;

// Collective over the world. Leaves the gradients (clipped) until the next step. `average` may be
// null.
StepReport training_step(FullySharded& sharded, Optimizer& optimizer, MovingAverage* average,
                         const comm::Mesh& mesh, const comm::FsdpMesh& fsdp,
                         const StepOptions& options, const MicroLoss& loss);

}  // namespace shardproof::fsdp
