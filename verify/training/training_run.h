// The steps of a training case under FSDP and sequence parallelism, put together into whole
// tensors.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "fsdp/training_step.h"
#include "verify/budget.h"
#include "verify/case.h"
#include "verify/training/reference_training.h"

namespace shardproof::verify {

// What a mutant changes; all empty in the product.
struct TrainingSubject {
  sim::FaultPlan faults;
  // In place of models::MeshContext.
  std::function<std::unique_ptr<models::ParallelContext>(const comm::Mesh&, models::ParallelOptions,
                                                         int rank)>
      make_context;
  std::function<void(fsdp::StepOptions&, int rank)> edit_step;
  // Replaces a rank's loss of a micro-batch.
  struct LossPlace {
    int rank, dp, micro_batch;
    double own_valid, all_valid;  // with masks: valid elements here, and of the whole step
  };
  std::function<at::Tensor(const at::Tensor& loss, const LossPlace&)> edit_loss;
  std::function<void(models::Dropout&, int rank)> edit_dropout;  // of each forward
  // Replaces the global number of valid elements that a rank computes with.
  std::function<double(double global, double own)> edit_count;
  // Changes a rank's gradients after their reduction, before norm and clipping.
  std::function<void(const std::vector<fsdp::TrainedTensor>&, int rank)> edit_gradients;
  Observer observe;  // told what is judged; may be empty
};

// Gradients are clipped to this norm in cases with `clip`; those of all cases are larger.
inline constexpr double kClipNorm = 0.02;

// As the case says, with TrainingConstants.
std::unique_ptr<fsdp::Optimizer> make_training_optimizer(const TrainingCase& c);

struct TrainingRun {
  bool completed = false;  // false: the checks say why there are no tensors
  TrainingTensors tensors;
  std::vector<CheckResult> checks;
};

// Named as the reference's. Checks: "coverage" (rows that are missing, copies that differ),
// "metric" (loss and norm are not the same on all ranks), "trace", and what the world finds.
TrainingRun run_parallel_training(const TrainingCase& c, const TrainingData& data,
                                  const TrainingSubject& subject, RankWorld& world);

// Number and elements of the collectives of FSDP on every rank against the formula.
CheckResult check_training_trace(const TrainingCase& c, const TrainingData& data,
                                 const RankWorld& world);

}  // namespace shardproof::verify
