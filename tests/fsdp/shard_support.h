// What tests of training on shards share: data, and the rows that a shard owns.
#pragma once
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <vector>

#include "fsdp/shard_layout.h"
#include "fsdp/trained_tensor.h"
#include "sim/world.h"
#include "tests/device.h"

namespace shardproof::tests {

// Drawn on the CPU: the same numbers on the suite's device, whatever it is.
inline at::Tensor normal(at::IntArrayRef shape, at::ScalarType dtype, at::Generator& random) {
  return at::empty(shape, at::kDouble).normal_(0, 1, random).to(dtype).to(device());
}

// A world of the suite's device.
inline sim::WorldOptions on_device() {
  sim::WorldOptions options;
  options.device = device();
  return options;
}

// A copy, as a rank has memory of its own; keeps [0, ...] where the shard owns nothing.
inline at::Tensor shard_of(const at::Tensor& whole, int index, int shards) {
  const plan::Interval rows = fsdp::ShardLayout{whole.size(0), shards}.shard(index);
  return whole.slice(0, rows.begin, rows.end).clone();
}

inline std::vector<double> to_doubles(const at::Tensor& x) {
  const at::Tensor flat = x.cpu().to(at::kDouble).contiguous().view(-1);
  return {flat.data_ptr<double>(), flat.data_ptr<double>() + flat.numel()};
}

}  // namespace shardproof::tests
