// What a buffer holds until its content has arrived: reading it early must show.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

namespace shardproof::sim {

// A flat tensor's bytes as 64-bit integers, if they divide.
std::optional<at::Tensor> as_words(const at::Tensor& flat);

// Sets all bits of a contiguous tensor: NaN in every floating type, -1 in integers; booleans are
// left alone.
void poison(const at::Tensor& x);

}  // namespace shardproof::sim
