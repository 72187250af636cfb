#include "fsdp/loss.h"

#include <ATen/ATen.h>

#include "comm/tag.h"

namespace shardproof::fsdp {

at::Tensor masked_mean(const at::Tensor& values, const at::Tensor& mask, double global_count,
                       int micro_batches, const comm::Communicator& dp) {
  return values.masked_fill(mask.logical_not(), 0).sum() *
         (micro_batches * dp.size() / global_count);
}

double count_valid(const at::Tensor& mask, const comm::Communicator& dp) {
  const comm::CollectiveScope scope("loss.count");
  const at::Tensor count = mask.sum().to(at::kDouble).view({1});
  return dp.all_reduce(count).wait().item<double>();
}

}  // namespace shardproof::fsdp
