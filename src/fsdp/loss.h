// Losses whose mean runs over all replicas.
#pragma once
#include <ATen/core/Tensor.h>

#include "comm/communicator.h"

namespace shardproof::fsdp {

// The mean of `values` where `mask` is true, over the elements of all replicas and micro-batches
// together, which may differ in number: this rank's share of it, scaled such that the mean over
// replicas and micro-batches (what a training step differentiates) is that mean. The mean of each
// replica's own mean is another number. `global_count`: from count_valid().
at::Tensor masked_mean(const at::Tensor& values, const at::Tensor& mask, double global_count,
                       int micro_batches, const comm::Communicator& dp);

// Valid elements of all replicas together. Collective over the group.
double count_valid(const at::Tensor& mask, const comm::Communicator& dp);

}  // namespace shardproof::fsdp
