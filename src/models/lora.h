// Low-rank adapters (LoRA, arXiv:2106.09685) on linear layers, in peft's adapter format.
#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "models/parameters.h"

namespace shardproof::models {

// peft's LoraConfig: y = x W^T + b + (alpha/rank) (x A^T) B^T. A layer is a target if its name is
// one of `targets` or ends in "." + one of them (peft's rule for a list).
struct LoraConfig {
  int64_t rank = 8;
  double alpha = 8;
  std::vector<std::string> targets = {"to_q", "to_k", "to_v", "to_out.0"};
};

// Whether the name is that of an A or B.
bool is_adapter(std::string_view name);

// Adds A [rank,in] and B [out,rank] for every target, named <layer>.lora_A.weight and
// <layer>.lora_B.weight, in the dtype and on the device of its weight, and freezes all others.
// A is drawn as peft does (Kaiming uniform), B is zero, so that the model starts unchanged. A
// layer's numbers depend on the seed and its place in the model alone.
// Errors (kBadInput), all problems in one, with the set unchanged: rank below 1; a target that no
// layer matches, or one that is not linear; adapters that are there already.
void add_lora(ParameterSet& parameters, const LoraConfig& config, uint64_t seed);

// A folder with adapter_config.json and adapter_model.safetensors; tensors are called
// base_model.model.<layer>.lora_A.weight there. Files are written atomically, the weights first; an
// old configuration is removed before. Errors (kBadInput): a configuration that is not that of the
// adapters (targets, rank, scale), and where writing fails.
void save_lora(const std::filesystem::path& folder, const LoraConfig& config,
               const ParameterSet& parameters);

// The same of adapters alone, whose model is not at hand: `adapters` are all A and B by name. The
// rank is theirs, alpha follows from `scale` (alpha / rank), and each layer is a target by its full
// name. Errors (kBadInput): as above; no adapters, a layer without A or B, ranks that differ.
void save_lora_alone(const std::filesystem::path& folder,
                     const std::map<std::string, at::Tensor>& adapters, double scale);

// Adds the folder's adapters, in the file's dtype and on the device of each weight, and freezes all
// others. diffusers' names, transformer.<layer>.lora_A.weight, are known, too.
// Errors (kBadInput), all problems in one, with the set unchanged: damaged or missing files; a
// peft_type other than LORA; a pattern as target_modules; any other option that is on (bias,
// dropout, DoRA, rsLoRA, rank and alpha patterns, ..., also unknown ones) or an initialisation that
// changes the base weights (PiSSA, LoftQ, ...); tensors for layers that the model lacks or that are
// no targets; a target without A or B; wrong shapes; and what add_lora refuses.
LoraConfig load_lora(const std::filesystem::path& folder, ParameterSet& parameters);

}  // namespace shardproof::models
