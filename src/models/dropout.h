// Dropout in training: y = x * mask / (1 - probability). LibTorch's own takes no generator, so
// ranks of one replica, which hold rows of the same tokens, could not agree on it.
//
// A mask depends on the seed, the module's name, the sample's number and the element's place in the
// whole stream alone: not on the mesh, the rank, the order of calls, or whether a block is
// recomputed. A parallel run drops what a run without parallelism drops. The price: each rank draws
// the numbers of a whole sample's stream (in fp32, one sample after the other) and keeps its rows.
// On CUDA the numbers depend on the kind of device, too.
//
// Where: behind the modules in which diffusers 0.42 has an nn.Dropout, under their names:
// "<block>.attn.to_out.1" (models/attention_processor.py, Attention; transformer_flux.py,
// FluxAttention; transformer_wan.py, WanAttention) and "<block>.ff.net.1" (models/attention.py,
// FeedForward). None is behind to_add_out and in Flux's single blocks. Their probability is 0 in
// the models of diffusers, whose configurations do not name it, so its results are those without.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "plan/attention_plan.h"

namespace shardproof::models {

struct Dropout {
  double probability = 0;  // in [0,1); 0: none, at no cost
  // The same on all SP ranks; another one for each step, micro-batch and pass of a loss.
  uint64_t seed = 0;
  // The number of the inputs' first sample among those of all replicas, which must not share masks:
  // dp * batch.
  int64_t first_sample = 0;
};

// Dropout on the rows that one SP rank holds of a plan's streams. A value of its own, as recomputed
// blocks outlive the forward.
class StreamDropout {
 public:
  // Null where the probability is 0. Errors (kBadInput): a probability outside [0,1).
  static std::shared_ptr<const StreamDropout> make(const Dropout& dropout,
                                                   const plan::AttentionPlan& plan, int sp_rank);

  // x [B, local rows of `stream`, C] behind the module `site`. Pad rows become zero. Errors
  // (kInternal): a stream that the plan does not have, another number of rows than it says.
  at::Tensor apply(const std::string& site, const std::string& stream, const at::Tensor& x) const;

 private:
  struct Rows {
    std::string stream;
    int64_t tokens;    // of the whole stream
    int64_t begin;     // this rank's first one
    int64_t own, all;  // its rows, without pads and with
  };
  StreamDropout(const Dropout& dropout, std::vector<Rows> rows)
      : dropout_(dropout), rows_(std::move(rows)) {}
  const Rows& rows_of(const std::string& stream) const;

  Dropout dropout_;
  std::vector<Rows> rows_;
};

}  // namespace shardproof::models
