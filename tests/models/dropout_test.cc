// Dropout: how much is dropped, and that masks depend on seed, module and sample alone.
#include "models/dropout.h"

#include "tests/catch.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <limits>

#include "base/error.h"
#include "models/layers.h"
#include "models/parallel.h"
#include "models/recompute.h"
#include "tests/file_support.h"

namespace shardproof::models {
namespace {

using at::Tensor;
using plan::StreamPlacement;
using plan::TokenSplit;
using tests::contains;
using tests::error_text;

plan::AttentionPlan plan_of(int sp, int64_t tokens, TokenSplit split = TokenSplit::kUneven,
                            StreamPlacement text = StreamPlacement::kSharded) {
  ParallelOptions options;
  options.token_split = split;
  options.text_placement = text;
  return plan_attention({1, sp, 1}, options, {{"text", 5}, {"image", tokens}}, 4);
}

// What is left of ones [2,tokens,8] of the image stream, on one rank that holds all.
Tensor image_mask(const Dropout& dropout, const std::string& site = "blocks.0.ff.net.1",
                  int64_t tokens = 13) {
  const auto op = StreamDropout::make(dropout, plan_of(1, tokens), 0);
  return op->apply(site, "image", at::ones({2, tokens, 8}, at::kDouble));
}

TEST_CASE("dropout: rate and scale", "[models][dropout]") {
  const Tensor y = image_mask({0.25, 3}, "attn.to_out.1", 4000);
  const Tensor kept = y.ne(0);
  CHECK(at::equal(y, kept.to(at::kDouble) / 0.75));
  // 64,000 elements: the standard deviation of the rate is 0.0017.
  CHECK(std::abs(kept.to(at::kDouble).mean().item<double>() - 0.75) < 0.01);
}

TEST_CASE("dropout: seed, module and sample make the mask", "[models][dropout]") {
  const Tensor y = image_mask({0.25, 3});
  CHECK(at::equal(y, image_mask({0.25, 3})));
  CHECK(!at::equal(y, image_mask({0.25, 4})));
  CHECK(!at::equal(y, image_mask({0.25, 3}, "blocks.1.ff.net.1")));
  CHECK(!at::equal(y[0], y[1]));
  // However samples are dealt to replicas, each keeps its mask.
  CHECK(at::equal(y[1], image_mask({0.25, 3, 1})[0]));
  CHECK(!at::equal(y[0], image_mask({0.25, 3, 1})[0]));
}

TEST_CASE("dropout: ranks drop their rows of the whole", "[models][dropout]") {
  const auto split = GENERATE(TokenSplit::kUneven, TokenSplit::kPadded);
  const Tensor whole = image_mask({0.25, 3});
  const plan::AttentionPlan plan = plan_of(3, 13, split);
  const plan::StreamPlan& image = plan.streams[1];
  for (size_t r = 0; r < 3; ++r) {
    const int64_t own = image.shards[r].size(), rows = image.local_rows[r];
    const Tensor y = StreamDropout::make({0.25, 3}, plan, static_cast<int>(r))
                         ->apply("blocks.0.ff.net.1", "image", at::ones({2, rows, 8}, at::kDouble));
    CHECK(at::equal(y.narrow(1, 0, own), whole.narrow(1, image.shards[r].begin, own)));
    CHECK(!y.narrow(1, own, rows - own).any().item<bool>());
  }
}

TEST_CASE("dropout: copies of a replicated stream are alike", "[models][dropout]") {
  const plan::AttentionPlan plan =
      plan_of(3, 13, TokenSplit::kUneven, StreamPlacement::kReplicated);
  const auto text = [&](int rank) {
    return StreamDropout::make({0.25, 3}, plan, rank)
        ->apply("ff_context.net.1", "text", at::ones({2, 5, 8}, at::kDouble));
  };
  CHECK(at::equal(text(0), text(1)));
  CHECK(at::equal(text(0), text(2)));
}

TEST_CASE("dropout: a recomputed block drops the same", "[models][dropout]") {
  const auto op = StreamDropout::make({0.25, 3}, plan_of(1, 13), 0);
  const auto gradients = [&](bool recomputed) {
    const Tensor x = at::linspace(-1, 1, 2 * 13 * 8, at::kFloat).view({2, 13, 8}).requires_grad_();
    const Tensor weight = at::linspace(-1, 1, 64, at::kFloat).view({8, 8}).requires_grad_();
    const Block block = [op, weight](const std::vector<Tensor>& in) {
      const Tensor h = op->apply("ff.net.1", "image", at::gelu(at::matmul(in[0], weight)));
      return std::vector<Tensor>{op->apply("attn.to_out.1", "image", at::matmul(h, weight))};
    };
    const Tensor y = recomputed ? recompute(block, {x})[0] : block({x})[0];
    torch::autograd::backward({y.square().sum()});
    return std::vector<Tensor>{y, x.grad(), weight.grad()};
  };
  const auto plain = gradients(false), again = gradients(true);
  for (size_t i = 0; i < 3; ++i) CHECK(at::equal(plain[i], again[i]));
}

TEST_CASE("dropout: probability 0 is no operation", "[models][dropout]") {
  CHECK(StreamDropout::make({0, 3}, plan_of(2, 13), 0) == nullptr);
  ParameterSet parameters({{"to_out.0.weight", {8, 8}}, {"to_out.0.bias", {8}}});
  parameters.set("to_out.0.weight", at::eye(8).requires_grad_());
  parameters.set("to_out.0.bias", at::zeros({8}));
  const Tensor x = at::ones({2, 13, 8});
  const auto last_operation = [&](double probability) {
    const Scope attn(parameters, DtypePolicy::kReference,
                     StreamDropout::make({probability, 3}, plan_of(1, 13), 0));
    return attn.attention_out("image", x).grad_fn()->name();
  };
  CHECK(
      last_operation(0) ==
      Scope(parameters, DtypePolicy::kReference, nullptr).linear("to_out.0", x).grad_fn()->name());
  CHECK(last_operation(0.5).starts_with("DivBackward"));
}

TEST_CASE("dropout: mistakes are named", "[models][dropout]") {
  for (const double p : {-0.1, 1.0, std::numeric_limits<double>::quiet_NaN()}) {
    CHECK(contains(error_text([&] {
                     StreamDropout::make({p, 3}, plan_of(2, 13), 0);
                   }),
                   "expected a probability of at least 0 and less than 1; got "));
  }
  const auto wrong = [](const std::string& stream, int64_t rows) {
    return error_text(
        [&] {
          StreamDropout::make({0.25, 3}, plan_of(2, 13), 0)
              ->apply("ff.net.1", stream, at::ones({2, rows, 8}));
        },
        ErrorKind::kInternal);
  };
  CHECK(contains(wrong("video", 7), "no stream 'video'"));
  CHECK(contains(wrong("image", 13), "ff.net.1: 7 rows of stream 'image'"));
}

}  // namespace
}  // namespace shardproof::models
