// The ring dimension of sequence parallelism: each rank's queries meet the keys and values of all
// ring ranks, either as K, V travel around the ring (ring attention, arXiv:2310.01889) with the
// transfer of the next block under the computation of this one, or all-gathered.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

#include "attention/local_attention.h"
#include "attention/merge.h"
#include "comm/communicator.h"
#include "plan/attention_plan.h"

namespace shardproof::attention {

class Ring {
 public:
  // The references must outlive the object. `block_masks`: per ring rank the key mask [B, rows of
  // its block], undefined tensors where nothing is masked. `kv_of_q`: see plan::HeadShard.
  Ring(const plan::AttentionPlan& plan, const comm::Communicator& group,
       const LocalAttention& local, const MergeFunction& merge, std::vector<at::Tensor> block_masks,
       const std::vector<int64_t>& kv_of_q, double scale);

  // q [B, own block, h, D]; k, v [B, own block, hk, D]. out in q's dtype; lse over all blocks.
  AttentionOutput forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const;

  // `out`, `lse`: the forward's. dK, dV are accumulated in fp32 or better and come back in k's
  // dtype.
  AttentionGradients backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                              const at::Tensor& v, const at::Tensor& out,
                              const at::Tensor& lse) const;

 private:
  AttentionOutput forward_rotating(const at::Tensor& q, const at::Tensor& k,
                                   const at::Tensor& v) const;
  AttentionOutput forward_gathered(const at::Tensor& q, const at::Tensor& k,
                                   const at::Tensor& v) const;
  AttentionGradients backward_rotating(const at::Tensor& dout, const at::Tensor& q,
                                       const at::Tensor& k, const at::Tensor& v,
                                       const at::Tensor& out, const at::Tensor& lse) const;
  AttentionGradients backward_gathered(const at::Tensor& dout, const at::Tensor& q,
                                       const at::Tensor& k, const at::Tensor& v,
                                       const at::Tensor& out, const at::Tensor& lse) const;
  AttentionOutput local_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                const at::Tensor& mask) const;
  AttentionGradients local_backward(const at::Tensor& dout, const at::Tensor& q,
                                    const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
                                    const at::Tensor& lse, const at::Tensor& mask) const;
  at::Tensor gather_kv(const at::Tensor& k, const at::Tensor& v) const;
  at::Tensor joint_mask() const;
  // The ring rank whose block this rank works on in step `step`.
  int owner(int step) const;

  const plan::AttentionPlan& plan_;
  const comm::Communicator& group_;
  const LocalAttention& local_;
  const MergeFunction& merge_;
  std::vector<at::Tensor> block_masks_;
  at::Tensor kv_index_;  // kv_of_q, undefined if empty
  double scale_;
};

}  // namespace shardproof::attention
