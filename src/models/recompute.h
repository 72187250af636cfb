// Activation checkpointing: a block keeps its inputs only and runs again in the backward pass.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace shardproof::models {

using Block = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

// block(inputs), its activations recomputed when gradients are asked for. The recomputation issues
// the same collectives in the same order, under tags with a trailing ~. Gradients of parameters
// that the block uses are accumulated into .grad (call backward(), not grad()).
std::vector<at::Tensor> recompute(const Block& block, const std::vector<at::Tensor>& inputs);

}  // namespace shardproof::models
