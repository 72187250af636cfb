// Cross-attention: other numbers of queries than of keys, and gradients that add up over ranks.
#include "attention/cross_attention.h"

#include "tests/attention/attention_support.h"

#include <torch/csrc/autograd/autograd.h>

#include <cmath>

namespace shardproof::attention {
namespace {

using at::Tensor;
using tests::Draw;
using tests::Problem;

struct Gradients {
  Tensor out, dq, dk, dv;
};

Gradients run(const Problem& p, int64_t begin, int64_t rows) {
  const auto leaf = [](const Tensor& x) { return x.detach().clone().requires_grad_(); };
  const Tensor q = leaf(p.q.narrow(1, begin, rows)), k = leaf(p.k), v = leaf(p.v);
  const auto local = make_local_attention("auto", at::kCPU, q.scalar_type(), false);
  const Tensor out = cross_attention(local, q, k, v);
  torch::autograd::backward({out}, {p.dout.narrow(1, begin, rows).contiguous()});
  return {out.detach(), q.grad(), k.grad(), v.grad()};
}

double distance(const Tensor& a, const Tensor& b) {
  return (a - b).norm().item<double>() / b.norm().item<double>();
}

TEST_CASE("cross-attention: shares of the queries add up to the whole", "[attention]") {
  Draw draw(11);
  Problem p;
  p.q = draw.normal({2, 9, 3, 8});
  p.k = draw.normal({2, 5, 3, 8});
  p.v = draw.normal({2, 5, 3, 8});
  p.dout = draw.normal({2, 9, 3, 8});
  p.scale = 1 / std::sqrt(8.0);
  const tests::Solution truth = tests::solve(p);
  const Gradients first = run(p, 0, 4), second = run(p, 4, 5);
  CHECK(distance(at::cat({first.out, second.out}, 1), truth.out) < 1e-14);
  CHECK(distance(at::cat({first.dq, second.dq}, 1), truth.dq) < 1e-14);
  CHECK(distance(first.dk + second.dk, truth.dk) < 1e-14);
  CHECK(distance(first.dv + second.dv, truth.dv) < 1e-14);
  CHECK(distance(first.dk, truth.dk) > 1e-2);  // one share alone is not the gradient
}

}  // namespace
}  // namespace shardproof::attention
