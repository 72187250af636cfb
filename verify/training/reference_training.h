// The same training steps without parallelism, written from the papers and torch's documentation:
// nothing of src/fsdp is called.
#pragma once
#include <map>
#include <string>

#include "verify/training/training_data.h"

namespace shardproof::verify {

// Whole tensors on the CPU: "step0/loss", "step0/grad_norm" [1], and by parameter
// "step0/<name>:grad" (before clipping), ":update" (value minus the value before training), and the
// optimizer's state: ":momentum_buffer" (SGD), ":exp_avg" and ":exp_avg_sq" (AdamW), ":ema".
using TrainingTensors = std::map<std::string, at::Tensor>;

// The hyperparameters of all cases.
struct TrainingConstants {
  static constexpr double kLearningRate = 1e-3;
  static constexpr double kMomentum = 0.9;
  static constexpr double kSgdDecay = 1e-2;
  static constexpr double kBeta1 = 0.9, kBeta2 = 0.95, kAdamDecay = 0.1;
  static constexpr double kEmaDecay = 0.9;
};

// One process, replica after replica. `exact`: all in fp64; else computed in the case's dtype, sums
// and parameters as its policy says. Errors: see models::Transformer::forward.
TrainingTensors run_reference_training(const TrainingCase& c, const TrainingData& data, bool exact,
                                       double max_norm, at::Device device);

}  // namespace shardproof::verify
