#include "models/rope.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace shardproof::models {

using at::Tensor;

RopeTable RopeTable::rows(int64_t begin, int64_t count) const {
  return {cos.narrow(0, begin, count), sin.narrow(0, begin, count)};
}

RopeTable rope_table(const Tensor& positions, const std::vector<int64_t>& dims,
                     at::ScalarType dtype, DtypePolicy policy) {
  const at::ScalarType type = policy == DtypePolicy::kFaithful ? at::kFloat : dtype;
  std::vector<Tensor> angles;
  for (size_t axis = 0; axis < dims.size(); ++axis) {
    const Tensor k = at::arange(0, dims[axis], 2, positions.options().dtype(type));
    const Tensor frequency = at::pow(10000.0, k / static_cast<double>(dims[axis])).reciprocal();
    const Tensor position = positions.select(1, static_cast<int64_t>(axis)).to(type);
    angles.push_back(position.unsqueeze(1) * frequency.unsqueeze(0));
  }
  const Tensor all = at::cat(angles, 1);
  return {at::cos(all), at::sin(all)};
}

RopeTable concatenate(const RopeTable& a, const RopeTable& b) {
  return {at::cat({a.cos, b.cos}, 0), at::cat({a.sin, b.sin}, 0)};
}

Tensor apply_rope(const Tensor& x, const RopeTable& table, DtypePolicy policy) {
  const at::ScalarType type = policy == DtypePolicy::kFaithful ? at::kFloat : x.scalar_type();
  const Tensor pairs = x.to(type).unflatten(-1, {-1, 2});
  const Tensor even = pairs.select(-1, 0), odd = pairs.select(-1, 1);
  const Tensor cos = table.cos.to(type).unsqueeze(1), sin = table.sin.to(type).unsqueeze(1);
  return at::stack({even * cos - odd * sin, even * sin + odd * cos}, -1)
      .flatten(-2)
      .to(x.scalar_type());
}

Tensor grid_positions(int64_t frames, int64_t rows, int64_t columns) {
  const auto axes = at::meshgrid(
      {at::arange(frames, at::kLong), at::arange(rows, at::kLong), at::arange(columns, at::kLong)},
      "ij");
  return at::stack({axes[0].flatten(), axes[1].flatten(), axes[2].flatten()}, 1);
}

Tensor qwen_image_positions(const std::vector<ImageShape>& images) {
  std::vector<Tensor> all;
  for (size_t i = 0; i < images.size(); ++i) {
    const auto [frames, h, w] = images[i];
    const Tensor offset = at::tensor({static_cast<int64_t>(i), h / 2 - h, w / 2 - w}, at::kLong);
    all.push_back(grid_positions(frames, h, w) + offset);
  }
  return at::cat(all, 0);
}

Tensor qwen_text_positions(const std::vector<ImageShape>& images, int64_t tokens) {
  int64_t offset = 0;
  for (const auto& [frames, h, w] : images) offset = std::max({offset, h / 2, w / 2});
  return (at::arange(tokens, at::kLong) + offset).unsqueeze(1).expand({tokens, 3});
}

}  // namespace shardproof::models
