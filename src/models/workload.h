// How much a model computes for inputs of a given size: floating-point operations by what does
// them, from the configuration alone. A product of [m,k] and [k,n] counts 2mkn; what is linear in
// the tokens and the width (norms, RoPE, activations, additions) counts nothing.
#pragma once
#include <string>
#include <vector>

#include "models/transformer.h"

namespace shardproof::models {

// In the order of the (joint) self-attention; streams that are only read come last. Latents: the
// VAE's factor is 8 along rows and columns, 4 along frames (frames - 1 of them). Errors
// (kBadInput): a size that the VAE and the patches do not divide, more tokens than the model's
// position table or this program takes.
std::vector<StreamTokens> stream_tokens(const Transformer& model, const SampleSize& size);

// Of the named stream, of all streams for "joint". Errors (kInternal): no such stream.
int64_t tokens_of(const std::vector<StreamTokens>& streams, const std::string& name);

// Multiply-adds x 2 of all linear layers that see this stream, for one of its tokens; conditioning
// (""): for one sample.
struct LinearWork {
  std::string stream;
  double flops_per_row = 0;
};
std::vector<LinearWork> linear_work(const Transformer& model);

struct WorkPart {
  std::string name;  // "linear image", "conditioning", "attention joint"
  double flops = 0;
};

struct Workload {
  int64_t samples = 1;
  std::vector<StreamTokens> streams;
  std::vector<WorkPart> forward;

  double forward_flops() const;
  // The backward computes two products for each one of the forward; recomputation adds a forward.
  double step_flops(bool recompute) const { return forward_flops() * (recompute ? 4 : 3); }
};

Workload count_work(const Transformer& model, const SampleSize& size, int64_t samples);

}  // namespace shardproof::models
