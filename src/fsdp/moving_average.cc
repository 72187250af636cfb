#include "fsdp/moving_average.h"

#include <ATen/ATen.h>

#include "base/error.h"

namespace shardproof::fsdp {
namespace {

void check_like(const at::Tensor& average, const TrainedTensor& tensor) {
  const at::Tensor& value = tensor.value;
  SP_CHECK(average.sizes() == value.sizes() && average.dtype() == value.dtype() &&
               average.device() == value.device(),
           "{} is {} {} on {}, its average {} {} on {}", tensor.name, c10::str(value.sizes()),
           c10::toString(value.scalar_type()), value.device().str(), c10::str(average.sizes()),
           c10::toString(average.scalar_type()), average.device().str());
}

}  // namespace

MovingAverage::MovingAverage(double decay) : decay_(decay) {
  if (!(decay >= 0 && decay < 1)) {  // so that a NaN is refused too
    bad_input("the decay of a moving average must be in [0, 1), is {}", decay);
  }
}

void MovingAverage::update(const std::vector<TrainedTensor>& tensors) {
  const at::NoGradGuard no_grad;
  if (averages_.empty()) {
    for (const TrainedTensor& tensor : tensors) {
      averages_[tensor.name] = tensor.value.detach().clone();
    }
    return;
  }
  for (const TrainedTensor& tensor : tensors) {
    const auto found = averages_.find(tensor.name);
    SP_CHECK(found != averages_.end(), "{} has no average, others have", tensor.name);
    check_like(found->second, tensor);
  }
  std::vector<at::Tensor> averages, values;
  for (const TrainedTensor& tensor : tensors) {
    if (tensor.value.numel() == 0) continue;
    averages.push_back(averages_.at(tensor.name));
    values.push_back(tensor.value);
  }
  if (!averages.empty()) at::_foreach_lerp_(averages, values, 1 - decay_);
}

}  // namespace shardproof::fsdp
