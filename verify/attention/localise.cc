#include "verify/attention/localise.h"

#include <ATen/ATen.h>

#include <limits>

#include "verify/attention/ownership.h"

namespace shardproof::verify {
namespace {

using at::Tensor;

// Squared error as [B,S,H]; what is not finite counts as huge, -inf against -inf as right.
Tensor squared_error(TensorRole role, const Tensor& result, std::span<const double> oracle) {
  const Tensor expected =
      at::from_blob(const_cast<double*>(oracle.data()), result.sizes(), at::kDouble);
  const Tensor got = result.to(at::kDouble);
  Tensor error = (got - expected).square();
  error = error.masked_fill(got.eq(expected), 0);
  error = at::nan_to_num(error, 1e300, 1e300, 1e300).clamp_max(1e100);
  return role == TensorRole::kLse ? error.transpose(1, 2) : error.sum(-1);
}

// World rank by replica and joint token.
std::vector<int> token_ranks(const AttentionCase& c) {
  const Ownership o = derive_ownership(c);
  std::vector<int> ranks;
  for (const TokenHome& home : o.text) ranks.push_back(home.sp_rank);
  for (const TokenHome& home : o.image) ranks.push_back(home.sp_rank);
  return ranks;
}

}  // namespace

Location localise_tokens(const comm::MeshShape& mesh, const std::vector<int>& owner,
                         const Tensor& error) {
  const int64_t batch = error.size(0) / mesh.dp;
  Location where;
  double worst = -1;
  Tensor of_worst;  // [S,H], zero outside the rank's tokens
  for (int dp = 0; dp < mesh.dp; ++dp) {
    const Tensor replica = error.narrow(0, dp * batch, batch).sum(0);
    for (int r = 0; r < mesh.sp(); ++r) {
      const Tensor mine = at::tensor(owner, at::kInt).eq(r).unsqueeze(-1);
      const Tensor part = replica.masked_fill(mine.logical_not(), 0);
      const double sum = part.sum().item<double>();
      if (sum <= worst) continue;
      worst = sum;
      of_worst = part;
      where.rank = dp * mesh.sp() + r;
    }
  }
  const Tensor by_head = of_worst.sum(0);
  const auto head = by_head.argmax().item<int64_t>();
  Tensor by_token = of_worst.sum(1);
  if (by_head[head].item<double>() > 0.5 * worst && by_head.numel() > 1) {
    where.head = static_cast<int>(head);
    by_token = of_worst.select(1, head);
  }
  const Tensor wrong = by_token.gt(by_token.max() * 1e-3).nonzero().view({-1});
  if (wrong.numel() > 0) {
    where.token_begin = wrong[0].item<int64_t>();
    where.token_end = wrong[-1].item<int64_t>() + 1;
  }
  return where;
}

Location localise(const AttentionCase& c, TensorRole role, const Tensor& result,
                  std::span<const double> oracle) {
  return localise_tokens(c.mesh, token_ranks(c), squared_error(role, result, oracle));
}

}  // namespace shardproof::verify
