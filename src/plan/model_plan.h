// Which tensors of a model sequence parallelism splits, where and along which dimension, as data
// (diffusers calls it _cp_plan). Models execute it; it can be printed and audited. No LibTorch.
#pragma once
#include <string>
#include <vector>

namespace shardproof::plan {

enum class TensorUse {
  kSplit,   // every rank takes its rows of the stream
  kGather,  // ranks put their rows together again
  kWhole    // every rank needs all of it: conditioning, masks, latents that are cut into patches
            // later
};

struct TensorRule {
  std::string module;  // where it happens, by its state-dict prefix; empty: the model itself
  std::string tensor;
  TensorUse use = TensorUse::kWhole;
  std::string stream = {};  // of kSplit and kGather
  int dims = 0;             // dimensions that the tensor must have, e.g. 3 for [B,S,C]
  int dim = 0;              // the one along which it is split or gathered
  bool optional = false;    // not in every call (a mask)
};

using ModelPlan = std::vector<TensorRule>;

// The rules that split `tensor`, gather it or leave it whole; null if there is none.
const TensorRule* find_rule(const ModelPlan& plan, const std::string& tensor);

std::string to_table(const ModelPlan& plan);

}  // namespace shardproof::plan
