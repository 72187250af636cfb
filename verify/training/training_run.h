// The steps of a training case under FSDP and sequence parallelism, put together into whole
// tensors.
#pragma once
#include <functional>
#include <vector>

#include "fsdp/training_step.h"
#include "verify/case.h"
#include "verify/training/reference_training.h"

namespace shardproof::verify {

// What a mutant changes; all empty in the product.
struct TrainingSubject {
  sim::FaultPlan faults;
  std::function<void(fsdp::StepOptions&, int rank)> edit_step;
  std::function<void(models::Dropout&, int rank)> edit_dropout;  // of each forward
  // Replaces the global number of valid elements that a rank computes with.
  std::function<double(double global, double own)> edit_count;
  // Changes a rank's gradients after their reduction, before norm and clipping.
  std::function<void(const std::vector<fsdp::TrainedTensor>&, int rank)> edit_gradients;
};

// Gradients are clipped to this norm in cases with `clip`; those of all cases are larger.
inline constexpr double kClipNorm = 0.02;

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
