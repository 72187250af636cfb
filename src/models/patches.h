// Cutting latents into patches and putting them together again.
#pragma once
#include <ATen/core/Tensor.h>

#include <array>

namespace shardproof::models {

// Patch size or grid as (frames, rows, columns).
using Patch = std::array<int64_t, 3>;

// [B,C,F,H,W] -> [B, tokens, C*pf*ph*pw]: the columns of a convolution with kernel = stride = patch
// (channel, frame, row, column). Errors (kBadInput): sizes that the patch does not divide.
at::Tensor to_patches(const at::Tensor& x, const Patch& patch);

// Tokens [B, tokens, pf*ph*pw*C] (channel last) of a grid -> [B,C,F,H,W].
at::Tensor from_patches(const at::Tensor& x, const Patch& grid, const Patch& patch);

}  // namespace shardproof::models
