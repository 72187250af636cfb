// Weights, inputs, targets and masks of a training case, drawn from its seed: other ones in every
// step, micro-batch and replica.
#pragma once
#include <vector>

#include "verify/models/model_data.h"
#include "verify/training/training_case.h"

namespace shardproof::verify {

struct MicroBatch {
  std::vector<ModelPass> passes;  // of all replicas together, as of a model case
  at::Tensor target;              // what the output should be, fp64
  at::Tensor mask;                // bool like target; each replica has another number of true ones
};

struct TrainingData {
  std::shared_ptr<const models::Transformer> model;
  models::ParameterSet parameters;               // in fp64, rounded to the case's dtype
  std::vector<std::vector<MicroBatch>> batches;  // by step and micro-batch
};

TrainingData draw_training_data(const TrainingCase& c);

// Elements of all replicas that a step's masks leave.
double count_valid_elements(const std::vector<MicroBatch>& step);

// With TrainingLoss::kPerRank: an SP rank's loss, of the elements that are its own; the mean over
// the ranks is the mean of all.
at::Tensor loss_of_own_elements(const TrainingCase& c, const at::Tensor& error, int sp_rank);

// Passes of one replica, on the device.
std::vector<ModelPass> micro_batch_passes(const TrainingCase& c, const TrainingData& data,
                                          const MicroBatch& batch, int dp, at::ScalarType dtype,
                                          at::Device device);

// Ends the graph behind the first block where a case with `stop` does; runs blocks with `inner`
// (which may be null) everywhere else.
class StoppingUnits final : public models::BlockUnits {
 public:
  StoppingUnits(const TrainingCase& c, const TrainingData& data, int step, int dp,
                models::BlockUnits* inner);
  std::vector<at::Tensor> run(const std::string& name, const models::Block& block,
                              const std::vector<at::Tensor>& inputs) override;

 private:
  std::string stop_behind_;  // empty: nowhere
  models::BlockUnits* inner_;
};

}  // namespace shardproof::verify
