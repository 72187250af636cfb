// What a model's forward asks of sequence parallelism, answered without ranks: each chunk of the
// tokens is a member of a lockstep.
#pragma once
#include "models/parallel.h"
#include "verify/matched/matched_attention.h"

namespace shardproof::verify {

class MatchedContext final : public models::ParallelContext {
 public:
  // `layout`: mesh and splits; its token and head counts are replaced by those that the model asks
  // for. The lockstep must outlive the object, and graphs that it is part of.
  MatchedContext(Lockstep& lockstep, int chunk, AttentionCase layout,
                 models::ParallelOptions options)
      : ParallelContext(std::move(options)),
        lockstep_(lockstep),
        chunk_(chunk),
        layout_(std::move(layout)) {}

  at::Device device() const override { return lockstep_.device(); }
  int sp_rank() const override { return chunk_; }
  plan::AttentionPlan plan(const std::vector<std::pair<std::string, int64_t>>& streams,
                           int64_t heads) const override;
  at::Tensor own_rows(const at::Tensor& x, const plan::StreamPlan& stream,
                      int64_t dim) const override;
  models::JointAttention attention(plan::AttentionPlan plan, at::ScalarType dtype,
                                   bool masked) const override;
  at::Tensor gather(const at::Tensor& x, const plan::StreamPlan& stream,
                    const std::string& site) const override;

 private:
  Lockstep& lockstep_;
  int chunk_;
  AttentionCase layout_;
};

}  // namespace shardproof::verify
