// Which rows of a parameter a shard owns. No LibTorch.
//
// As PyTorch's FSDP2 (fully_shard, torch/distributed/fsdp): dimension 0 is cut into equal chunks of
// ceil(rows/shards) rows; the last shards own fewer, or none.
#pragma once
#include <algorithm>
#include <cstdint>

#include "plan/attention_plan.h"

namespace shardproof::fsdp {

struct ShardLayout {
  int64_t rows = 0;  // of the whole, along dimension 0; a scalar has one
  int shards = 1;

  // Rows that a shard travels with, pads included.
  int64_t chunk() const { return (rows + shards - 1) / shards; }
  // Rows that shard `index` owns.
  plan::Interval shard(int index) const {
    return {std::min(rows, index * chunk()), std::min(rows, (index + 1) * chunk())};
  }
  bool operator==(const ShardLayout&) const = default;
};

}  // namespace shardproof::fsdp
