// An exponential moving average (EMA) of this rank's shards.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "fsdp/trained_tensor.h"

namespace shardproof::fsdp {

class MovingAverage {
 public:
  // Errors (kBadInput): a decay outside [0, 1).
  explicit MovingAverage(double decay);

  // average = decay * average + (1 - decay) * value, in the value's dtype; the first call copies.
  // Errors (kInternal): later, a tensor without an average, or with one that is not like it.
  void update(const std::vector<TrainedTensor>& tensors);
  // By parameter; empty before the first update.
  const std::map<std::string, at::Tensor>& averages() const { return averages_; }
  // Continues in these tensors, which updates change.
  void restore(std::map<std::string, at::Tensor> averages) { averages_ = std::move(averages); }

 private:
  double decay_;
  std::map<std::string, at::Tensor> averages_;
};

}  // namespace shardproof::fsdp
