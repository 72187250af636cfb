#include "attention/ring.h"

#include <ATen/ATen.h>

#include <optional>

#include "base/error.h"
#include "comm/tag.h"

namespace shardproof::attention {
namespace {

using at::Tensor;
using comm::CollectiveScope;
using comm::Pending;

// k and v side by side as one dense message [2,B,S,hk,D].
Tensor pair_up(const Tensor& k, const Tensor& v) { return at::stack({k, v}, 0); }

std::vector<int64_t> with_tokens(const Tensor& pair, int64_t tokens) {
  auto shape = pair.sizes().vec();
  shape[2] = tokens;
  return shape;
}

}  // namespace

Ring::Ring(const plan::AttentionPlan& plan, const comm::Communicator& group,
           const LocalAttention& local, const MergeFunction& merge, std::vector<Tensor> block_masks,
           const std::vector<int64_t>& kv_of_q, double scale)
    : plan_(plan),
      group_(group),
      local_(local),
      merge_(merge),
      block_masks_(std::move(block_masks)),
      scale_(scale) {
  SP_CHECK(group.size() == plan.mesh.ring, "ring group of {} ranks for {}", group.size(),
           plan.mesh.to_string());
  if (!kv_of_q.empty()) kv_index_ = at::tensor(kv_of_q, at::kLong);
}

int Ring::owner(int step) const { return (group_.rank() - step + group_.size()) % group_.size(); }

AttentionOutput Ring::forward(const Tensor& q, const Tensor& k, const Tensor& v) const {
  if (group_.size() == 1) return local_forward(q, k, v, block_masks_[0]);
  return plan_.ring_mode == plan::RingMode::kRotate ? forward_rotating(q, k, v)
                                                    : forward_gathered(q, k, v);
}

AttentionGradients Ring::backward(const Tensor& dout, const Tensor& q, const Tensor& k,
                                  const Tensor& v, const Tensor& out, const Tensor& lse) const {
  AttentionGradients grads =
      group_.size() == 1 ? local_backward(dout, q, k, v, out, lse, block_masks_[0])
      : plan_.ring_mode == plan::RingMode::kRotate ? backward_rotating(dout, q, k, v, out, lse)
                                                   : backward_gathered(dout, q, k, v, out, lse);
  return {grads.dq.to(q.scalar_type()), grads.dk.to(k.scalar_type()), grads.dv.to(v.scalar_type())};
}

AttentionOutput Ring::local_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                    const Tensor& mask) const {
  if (!kv_index_.defined()) return local_.forward(q, k, v, mask, scale_);
  const Tensor index = kv_index_.to(q.device());
  return local_.forward(q, k.index_select(2, index), v.index_select(2, index), mask, scale_);
}

AttentionGradients Ring::local_backward(const Tensor& dout, const Tensor& q, const Tensor& k,
                                        const Tensor& v, const Tensor& out, const Tensor& lse,
                                        const Tensor& mask) const {
  if (!kv_index_.defined()) return local_.backward(dout, q, k, v, out, lse, mask, scale_);
  const Tensor index = kv_index_.to(q.device());
  AttentionGradients g = local_.backward(dout, q, k.index_select(2, index),
                                         v.index_select(2, index), out, lse, mask, scale_);
  const at::ScalarType type = accumulate_type(k.scalar_type());
  const auto sum_heads = [&](const Tensor& grad) {
    return at::zeros(k.sizes(), k.options().dtype(type)).index_add_(2, index, grad.to(type));
  };
  return {g.dq, sum_heads(g.dk), sum_heads(g.dv)};
}

AttentionOutput Ring::forward_rotating(const Tensor& q, const Tensor& k, const Tensor& v) const {
  const CollectiveScope scope("kv.rotate");
  const int n = group_.size(), to = (group_.rank() + 1) % n, from = (group_.rank() + n - 1) % n;
  Tensor kv = pair_up(k, v);
  PartialAttention result;
  for (int step = 0; step < n; ++step) {
    std::optional<Pending> next;
    if (step + 1 < n) {
      next = group_.exchange(kv, to, with_tokens(kv, plan_.block_rows(owner(step + 1))), from);
    }
    const Tensor& mask = block_masks_[static_cast<size_t>(owner(step))];
    result = merge_(result, local_forward(q, kv[0], kv[1], mask));
    if (next) kv = next->wait();
  }
  return {result.out.to(q.scalar_type()), result.lse};
}

// K, V go around once more. The gradients of a block travel with it, one step behind the block: the
// sum over ranks so far arrives while this rank computes its share, and after the last step goes
// home to the block's owner.
AttentionGradients Ring::backward_rotating(const Tensor& dout, const Tensor& q, const Tensor& k,
                                           const Tensor& v, const Tensor& out,
                                           const Tensor& lse) const {
  const int n = group_.size(), to = (group_.rank() + 1) % n, from = (group_.rank() + n - 1) % n;
  const at::ScalarType type = accumulate_type(k.scalar_type());
  Tensor kv = pair_up(k, v);
  Tensor dq;
  std::optional<Pending> sum_so_far;
  for (int step = 0; step < n; ++step) {
    std::optional<Pending> next;
    if (step + 1 < n) {
      const CollectiveScope scope("kv.rotate");
      next = group_.exchange(kv, to, with_tokens(kv, plan_.block_rows(owner(step + 1))), from);
    }
    const Tensor& mask = block_masks_[static_cast<size_t>(owner(step))];
    const AttentionGradients g = local_backward(dout, q, kv[0], kv[1], out, lse, mask);
    dq = step == 0 ? g.dq.to(type) : dq.add_(g.dq);
    Tensor dkv = pair_up(g.dk.to(type), g.dv.to(type));
    if (sum_so_far) dkv.add_(sum_so_far->wait());
    const CollectiveScope scope("dkv.rotate");
    const auto shape = with_tokens(dkv, plan_.block_rows(owner(step + 1)));
    sum_so_far = group_.exchange(std::move(dkv), to, shape, from);
    if (next) kv = next->wait();
  }
  const Tensor dkv = sum_so_far->wait();
  return {dq, dkv[0], dkv[1]};
}

// [all blocks' rows, B, 2*hk, D], blocks in ring order.
Tensor Ring::gather_kv(const Tensor& k, const Tensor& v) const {
  const CollectiveScope scope("kv.gather");
  std::vector<int64_t> rows;
  for (int r = 0; r < group_.size(); ++r) rows.push_back(plan_.block_rows(r));
  return group_.all_gather(at::cat({k, v}, 2).transpose(0, 1).contiguous(), rows).wait();
}

Tensor Ring::joint_mask() const {
  return block_masks_[0].defined() ? at::cat(block_masks_, 1) : Tensor();
}

AttentionOutput Ring::forward_gathered(const Tensor& q, const Tensor& k, const Tensor& v) const {
  const Tensor kv = gather_kv(k, v).transpose(0, 1);
  const int64_t h = k.size(2);
  return local_forward(q, kv.narrow(2, 0, h), kv.narrow(2, h, h), joint_mask());
}

AttentionGradients Ring::backward_gathered(const Tensor& dout, const Tensor& q, const Tensor& k,
                                           const Tensor& v, const Tensor& out,
                                           const Tensor& lse) const {
  const Tensor kv = gather_kv(k, v).transpose(0, 1);
  const int64_t h = k.size(2);
  const AttentionGradients g =
      local_backward(dout, q, kv.narrow(2, 0, h), kv.narrow(2, h, h), out, lse, joint_mask());
  std::vector<int64_t> rows;
  for (int r = 0; r < group_.size(); ++r) rows.push_back(plan_.block_rows(r));
  const at::ScalarType type = accumulate_type(k.scalar_type());
  const CollectiveScope scope("dkv.scatter");
  const Tensor shares = at::cat({g.dk.to(type), g.dv.to(type)}, 2).transpose(0, 1).contiguous();
  const Tensor mine = group_.reduce_scatter(shares, rows).wait().transpose(0, 1);
  return {g.dq, mine.narrow(2, 0, h), mine.narrow(2, h, h)};
}

}  // namespace shardproof::attention
