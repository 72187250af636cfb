// Which rows of a parameter a shard owns. No LibTorch.
//
// As PyTorch's FSDP2 (fully_shard, torch/distributed/fsdp): dimension 0 is cut into equal chunks of
// ceil(rows/shards) rows; the last shards own fewer, or none.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "plan/attention_plan.h"

namespace shardproof::fsdp {

// Rows of a tensor, along dimension 0; a scalar has one.
inline int64_t rows_of(const std::vector<int64_t>& shape) { return shape.empty() ? 1 : shape[0]; }
// The shape with another number of rows; of a scalar's rows: [rows].
inline std::vector<int64_t> with_rows(std::vector<int64_t> shape, int64_t rows) {
  if (shape.empty()) return {rows};
  shape[0] = rows;
  return shape;
}

struct ShardLayout {
  int64_t rows = 0;  // of the whole
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
