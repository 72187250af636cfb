// A tiny model with weights, and folders with files to load.
#pragma once
#include "tests/catch.h"

#include <filesystem>
#include <map>
#include <string>

#include "models/transformer.h"

namespace shardproof::tests {

using Tensors = std::map<std::string, at::Tensor>;

// A QwenImageTransformer2DModel of two blocks, 16 channels.
JsonValue tiny_config();
// Its parameters, drawn from N(0, 0.1^2).
models::ParameterSet tiny_parameters(uint64_t seed, at::ScalarType dtype = at::kDouble);
// Of fixed inputs, on one rank, in fp64.
at::Tensor run_tiny(const models::ParameterSet& parameters);

Tensors to_map(const models::ParameterSet& parameters);
// Same names, shapes, dtypes and values.
void check_same(const models::ParameterSet& a, const models::ParameterSet& b);

// The text with `from`, which must be in it, replaced by `to`.
std::string replaced(std::string text, const std::string& from, const std::string& to);

}  // namespace shardproof::tests
