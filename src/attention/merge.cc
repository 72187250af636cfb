#include "attention/merge.h"

#include <ATen/ATen.h>

#include <limits>

namespace shardproof::attention {
namespace {

// exp(lse - merged) as [B,S,H,1]; exact 0 where lse is -inf (also where both are: -inf - -inf).
at::Tensor weight(const at::Tensor& lse, const at::Tensor& merged) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  return at::exp(lse - merged).masked_fill_(lse.eq(-kInf), 0).transpose(1, 2).unsqueeze(-1);
}

}  // namespace

PartialAttention merge_block(const PartialAttention& so_far, const AttentionOutput& block) {
  const at::ScalarType type = accumulate_type(block.out.scalar_type());
  if (!so_far.out.defined()) return {block.out.to(type), block.lse};
  const at::Tensor merged = at::logaddexp(so_far.lse, block.lse);
  at::Tensor out = so_far.out * weight(so_far.lse, merged);
  out.addcmul_(block.out.to(type), weight(block.lse, merged));
  return {out, merged};
}

}  // namespace shardproof::attention
