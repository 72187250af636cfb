// Activation checkpointing: the same gradients from inputs alone, under marked tags.
#include "models/recompute.h"

#include "tests/catch.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "comm/tag.h"

namespace shardproof::models {
namespace {

using at::Tensor;

Tensor ramp(at::IntArrayRef shape, double step) {
  return (at::arange(c10::multiply_integers(shape), at::kDouble) * step).view(shape);
}

struct Layer {
  Tensor weight = ramp({3, 3}, 0.1).requires_grad_();
  int runs = 0;
  std::vector<std::string> tags;
  std::vector<Tensor> operator()(const std::vector<Tensor>& x) {
    ++runs;
    const comm::CollectiveScope scope("attn");
    tags.push_back(comm::current_tag());
    return {at::tanh(at::matmul(x[0], weight)) + x[1], x[0] * 2};
  }
};

TEST_CASE("recompute: gradients of inputs and parameters are the plain ones", "[models]") {
  Layer plain, again;
  const auto run = [](Layer& layer, bool recomputed) {
    const Tensor a = ramp({2, 3}, 0.3).requires_grad_(), b = ramp({2, 3}, -0.2).requires_grad_();
    const comm::CollectiveScope scope("blocks.0");
    const Block block = [&layer](const std::vector<Tensor>& x) { return layer(x); };
    const auto y = recomputed ? recompute(block, {a, b}) : block({a, b});
    torch::autograd::backward({(y[0] * ramp({2, 3}, 1)).sum() + y[1].sum()});
    return std::vector<Tensor>{a.grad(), b.grad(), layer.weight.grad()};
  };
  const auto expected = run(plain, false), got = run(again, true);
  for (size_t i = 0; i < 3; ++i) CHECK(at::equal(expected[i], got[i]));
  CHECK(plain.runs == 1);
  CHECK(again.runs == 2);
  CHECK(again.tags == std::vector<std::string>{"blocks.0/attn", "blocks.0/attn~"});
}

TEST_CASE("recompute: frozen inputs do not lose the parameters' gradients", "[models]") {
  Layer layer;
  const Block block = [&layer](const std::vector<Tensor>& x) { return layer(x); };
  const auto y = recompute(block, {ramp({2, 3}, 0.3), ramp({2, 3}, 0.1)});
  torch::autograd::backward({y[0].sum()});
  REQUIRE(layer.weight.grad().defined());
  CHECK(layer.weight.grad().abs().max().item<double>() > 0);
}

TEST_CASE("recompute: an output that nobody uses", "[models]") {
  Layer layer;
  const Tensor a = ramp({2, 3}, 0.3).requires_grad_(), b = ramp({2, 3}, -0.2).requires_grad_();
  const Block block = [&layer](const std::vector<Tensor>& x) { return layer(x); };
  const auto y = recompute(block, {a, b});
  torch::autograd::backward({y[1].sum()});
  CHECK(at::equal(a.grad(), at::full({2, 3}, 2.0, at::kDouble)));
  CHECK(at::equal(b.grad(), at::zeros({2, 3}, at::kDouble)));
}

}  // namespace
}  // namespace shardproof::models
