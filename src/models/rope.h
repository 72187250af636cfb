// Rotary position embedding over interleaved pairs (2k, 2k+1), as all four models use it.
#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <vector>

#include "models/layers.h"

namespace shardproof::models {

// cos and sin of the angles, [S, D/2].
struct RopeTable {
  at::Tensor cos;
  at::Tensor sin;
  RopeTable rows(int64_t begin, int64_t count) const;
};

// positions [S, axes]; axis a gives dims[a]/2 angles position * 10000^(-2k/dims[a]).
RopeTable rope_table(const at::Tensor& positions, const std::vector<int64_t>& dims,
                     at::ScalarType dtype, DtypePolicy policy);

// Tables one behind the other.
RopeTable concatenate(const RopeTable& a, const RopeTable& b);

// x [B,S,H,D] -> rotated, in x's dtype (in fp32 within under kFaithful).
at::Tensor apply_rope(const at::Tensor& x, const RopeTable& table, DtypePolicy policy);

// QwenImage (transformer_qwenimage.py, QwenEmbedRope with scale_rope): image i of (frames, h, w)
// has rows (i + frame, row - (h - h/2), column - (w - w/2)); text has max(h/2, w/2) + 0, 1, ... on
// all axes. int64 positions [S,3].
using ImageShape = std::array<int64_t, 3>;
at::Tensor qwen_image_positions(const std::vector<ImageShape>& images);
at::Tensor qwen_text_positions(const std::vector<ImageShape>& images, int64_t tokens);

// All (frame, row, column) of a grid, in that order. [frames*rows*columns, 3].
at::Tensor grid_positions(int64_t frames, int64_t rows, int64_t columns);

}  // namespace shardproof::models
