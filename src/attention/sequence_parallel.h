// Joint attention of several token streams over a mesh of ranks: Ulysses, ring, or ulysses inside
// ring, forward and backward, as the plan says.
//
// Every rank holds its rows of q, k, v of each stream and gets its rows of the output. A replicated
// stream (text that is not sharded) is held whole by every SP rank; attention works on this rank's
// rows of it, as if it were sharded, and gathers its output, so that each mode and mesh treats it
// alike. Gradients of a replicated input are partial: their sum over SP ranks is the gradient.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "attention/local_attention.h"
#include "attention/merge.h"
#include "comm/mesh.h"
#include "plan/attention_plan.h"

namespace shardproof::attention {

// [B, local rows (pads last), H, D]; k, v with the KV heads. Strides are free.
struct StreamQkv {
  at::Tensor q;
  at::Tensor k;
  at::Tensor v;
};

struct SequenceParallelOutput {
  // Like each stream's q; pad rows are zeros. They may be changed in place, except that with one
  // stream and ulysses = 1 the backward reads the output: then autograd reports the change.
  std::vector<at::Tensor> streams;
  // [B, this rank's heads, rows of its ring block (rank-major)]; for checks, no gradient.
  at::Tensor lse;
};

class SequenceParallelAttention {
 public:
  // `merge` is what joins the blocks of a ring; other values than merge_block serve to plant
  // faults.
  SequenceParallelAttention(plan::AttentionPlan plan, const comm::Mesh& mesh,
                            std::shared_ptr<const LocalAttention> local,
                            MergeFunction merge = merge_block);

  // Collective over the SP group; differentiable. `key_mask`: bool [B, joint tokens] in joint
  // order, the same on all SP ranks; undefined = every token may be attended to. What pad rows and
  // masked keys hold (NaN included) never reaches a result. `scale` defaults to 1/sqrt(D). Errors
  // (kBadInput): shapes, dtypes or devices that do not fit the plan.
  SequenceParallelOutput operator()(const std::vector<StreamQkv>& streams,
                                    const at::Tensor& key_mask = {},
                                    std::optional<double> scale = {}) const;

  const plan::AttentionPlan& plan() const;

  class Impl;

 private:
  std::shared_ptr<const Impl> impl_;
};

}  // namespace shardproof::attention
