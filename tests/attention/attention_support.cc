#include "tests/attention/attention_support.h"

#include <ATen/CPUGeneratorImpl.h>

#include <cmath>
#include <limits>

#include "base/error.h"
#include "verify/oracle/attention_oracle.h"

namespace shardproof::tests {

using at::Tensor;
constexpr double kInf = std::numeric_limits<double>::infinity();

Draw::Draw(uint64_t seed)
    : numbers_(seed), tensors_(at::make_generator<at::CPUGeneratorImpl>(seed)) {}

int64_t Draw::whole(int64_t low, int64_t high) {
  return low + static_cast<int64_t>(numbers_() % static_cast<uint64_t>(high - low + 1));
}

Tensor Draw::normal(at::IntArrayRef shape, at::ScalarType dtype) {
  return at::randn(shape, tensors_, at::TensorOptions(at::kDouble)).to(dtype);
}

Tensor Draw::mask(int64_t batch, int64_t keys, double kept) {
  return at::rand({batch, keys}, tensors_, at::TensorOptions(at::kDouble)).lt(kept);
}

Solution solve(const Problem& p) {
  const auto dense = [](const Tensor& x) { return x.to(at::kDouble).contiguous(); };
  const Tensor q = dense(p.q), k = dense(p.k), v = dense(p.v), dout = dense(p.dout);
  const Tensor mask = p.mask.defined() ? p.mask.to(at::kByte).contiguous() : Tensor();
  verify::AttentionProblem problem;
  problem.batch = q.size(0), problem.q_tokens = q.size(1), problem.kv_tokens = k.size(1);
  problem.q_heads = q.size(2), problem.kv_heads = k.size(2), problem.head_dim = q.size(3);
  problem.scale = p.scale;
  problem.q = q.const_data_ptr<double>();
  problem.k = k.const_data_ptr<double>();
  problem.v = v.const_data_ptr<double>();
  problem.dout = dout.const_data_ptr<double>();
  problem.key_mask = mask.defined() ? mask.const_data_ptr<uint8_t>() : nullptr;
  const verify::AttentionReference r = verify::attention_oracle(problem);

  const auto tensor = [](const std::vector<double>& values, at::IntArrayRef shape) {
    return at::tensor(values, at::kDouble).view(shape);
  };
  return {tensor(r.out, q.sizes()),    tensor(r.lse, {q.size(0), q.size(2), q.size(1)}),
          tensor(r.dq, q.sizes()),     tensor(r.dk, k.sizes()),
          tensor(r.dv, v.sizes()),     tensor(r.out_abs, q.sizes()),
          tensor(r.dq_abs, q.sizes()), tensor(r.dk_abs, k.sizes()),
          tensor(r.dv_abs, v.sizes())};
}

std::ostream& operator<<(std::ostream& out, Small small) {
  return out << fmt::format("{:.3e}", small.value);
}

Small error(const Tensor& x, const Tensor& expected, const Tensor& magnitude) {
  REQUIRE(x.sizes().vec() == expected.sizes().vec());
  const double difference = (x.to(at::kDouble) - expected).norm().item<double>();
  if (!std::isfinite(difference)) return {kInf};
  if (difference == 0) return {0};
  return {difference / magnitude.norm().item<double>()};
}

Small error(const Tensor& x, const Tensor& expected) { return error(x, expected, expected); }

Small max_abs(const Tensor& x, const Tensor& expected) {
  REQUIRE(x.sizes().vec() == expected.sizes().vec());
  if (x.numel() == 0) return {0};
  const Tensor wide = x.to(at::kDouble),
               both_empty = wide.eq(-kInf).logical_and(expected.eq(-kInf));
  const Tensor difference = (wide - expected).abs().masked_fill(both_empty, 0);
  return {at::nan_to_num(difference, kInf).max().item<double>()};
}

bool all_zero(const Tensor& x) { return x.eq(0).all().item<bool>(); }

std::vector<Tensors> on_ranks(sim::World& world,
                              const std::function<Tensors(sim::RankContext&)>& fn) {
  std::vector<Tensors> results(static_cast<size_t>(world.size()));
  world.run([&](sim::RankContext& rank) { results[static_cast<size_t>(rank.rank())] = fn(rank); });
  return results;
}

}  // namespace shardproof::tests
