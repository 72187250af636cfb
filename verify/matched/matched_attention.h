// Joint attention of all chunks of a sequence at once, without communication, in the arithmetic
// that sequence parallelism has: the same calls of the local attention, the same order of sums.
#pragma once
#include <memory>
#include <vector>

#include "attention/local_attention.h"
#include "plan/attention_plan.h"
#include "verify/attention/attention_case.h"
#include "verify/matched/lockstep.h"

namespace shardproof::verify {

// Which chunk holds which tokens and heads, by counting (verify/attention/ownership.h): the plan's
// builder is not called. Masks are read through the rows; block_tokens stays empty.
plan::AttentionPlan count_chunks(const AttentionCase& c,
                                 const std::vector<std::pair<std::string, int64_t>>& streams);

class MatchedAttention {
 public:
  MatchedAttention(plan::AttentionPlan chunks,
                   std::shared_ptr<const attention::LocalAttention> local);

  // `chunks[c]`: q, k, v of each stream, [B, local rows, H, D] (see
  // attention::SequenceParallelAttention). Per chunk: the output of each stream, then what
  // backward() needs. `key_mask`: bool [B, joint tokens] or undefined.
  std::vector<Lockstep::Values> forward(const std::vector<Lockstep::Values>& chunks,
                                        const at::Tensor& key_mask) const;
  // `chunks[c]`: the cotangent of each stream's output, then what forward() left. Per chunk: the
  // gradients of q, k, v of each stream.
  std::vector<Lockstep::Values> backward(const std::vector<Lockstep::Values>& chunks,
                                         const at::Tensor& key_mask) const;

  size_t streams() const { return chunks_.streams.size(); }

 private:
  using Tensor = at::Tensor;
  int ring() const { return chunks_.mesh.ring; }
  int ulysses() const { return chunks_.mesh.ulysses; }
  size_t chunk(int block, int member) const {
    return static_cast<size_t>(block * ulysses() + member);
  }
  bool replicated(size_t stream) const {
    return chunks_.streams[stream].placement == plan::StreamPlacement::kReplicated;
  }
  plan::Interval shard(size_t stream, size_t chunk) const {
    return chunks_.streams[stream].shards[chunk];
  }
  Tensor own_rows(const Tensor& x, size_t stream, size_t chunk) const;
  Tensor put_back(const Tensor& own, size_t stream, size_t chunk) const;
  // Per block: rows of all its chunks, all heads, [B, rows, H, D].
  std::vector<Tensor> blocks(const std::vector<std::vector<Tensor>>& rows) const;
  std::vector<Tensor> block_masks(const Tensor& key_mask) const;
  Tensor heads_of(const Tensor& x, int member) const;
  // All members' heads side by side, pads left out; only the chunk's rows of the block.
  Tensor rows_of_chunk(const std::vector<Tensor>& by_member, int block, int member) const;
  std::vector<Tensor> cut_streams(const Tensor& rows, size_t chunk) const;

  attention::AttentionOutput forward_block(int block, const std::vector<Tensor>& q,
                                           const std::vector<Tensor>& k,
                                           const std::vector<Tensor>& v,
                                           const std::vector<Tensor>& masks, double scale) const;
  // Of one member's heads, all blocks: per block dq, dk, dv.
  std::vector<attention::AttentionGradients> backward_blocks(
      const std::vector<Tensor>& dout, const std::vector<Lockstep::Values>& states,
      const std::vector<Tensor>& masks, double scale) const;

  plan::AttentionPlan chunks_;
  std::shared_ptr<const attention::LocalAttention> local_;
};

}  // namespace shardproof::verify
