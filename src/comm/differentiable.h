// Collectives that autograd understands, each with its adjoint stated.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace shardproof::comm {

// What the backward of an all-gather does with the cotangent of the gathered tensor. All agree for
// a loss that is the same on all ranks (up to the stated factor); for a loss that depends on the
// rank only kSum is the gradient.
enum class GatherAdjoint {
  kOwnSlice,       // own rows
  kOwnSliceTimes,  // own rows x group size
  kSum             // sum over the ranks, then own rows
};

// x [B, rows[rank], ...] -> [B, sum(rows), ...], along dimension 1. The sum of kSum is taken in
// fp32 or better. `site` is appended to the tag.
at::Tensor gather_rows(const at::Tensor& x, const Communicator& group,
                       const std::vector<int64_t>& rows, GatherAdjoint adjoint,
                       const std::string& site);

}  // namespace shardproof::comm
