// The error budget: known errors pass and fail at the documented limits.
#include "verify/budget.h"

#include "tests/catch.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <cmath>
#include <limits>

#include "verify/dtype.h"
#include "verify/oracle/error_norms.h"

namespace shardproof::verify {
namespace {

using at::Tensor;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

std::vector<double> values(const Tensor& x) {
  const Tensor dense = x.to(at::kDouble).contiguous();
  return {dense.const_data_ptr<double>(), dense.const_data_ptr<double>() + dense.numel()};
}

// An oracle and noise at right angles to it, both of norm sqrt(n): an error of known size that does
// not change the best-fit scale.
struct Sample {
  explicit Sample(int64_t n) {
    auto random = at::make_generator<at::CPUGeneratorImpl>(17);
    const auto draw = [&] { return at::randn({n}, random, at::TensorOptions(at::kDouble)); };
    const double size = std::sqrt(static_cast<double>(n));
    oracle = draw();
    oracle = oracle * (size / oracle.norm());
    noise = draw();
    noise = noise - oracle * (noise.dot(oracle) / oracle.dot(oracle));
    noise = noise * (size / noise.norm());
    oracle_values = values(oracle);
  }

  // A tensor that errs by `error`, relative L2.
  Tensor with_error(double error) const { return oracle + error * noise; }

  // `magnitude` is that of the oracle itself unless said otherwise.
  Judgement judge_these(const Tensor& result, const Tensor& reference,
                        TensorRole role = TensorRole::kOutput, c10::ScalarType dtype = at::kFloat,
                        double magnitude = 1) const {
    const std::vector<double> sizes = values(oracle.abs() * magnitude);
    Judged t;
    t.name = "x";
    t.role = role, t.dtype = dtype;
    t.result = result, t.reference = reference;
    t.oracle = oracle_values, t.magnitude = sizes;
    return judge(t);
  }

  Tensor oracle, noise;
  std::vector<double> oracle_values;
};

constexpr TensorRole kRoles[] = {TensorRole::kOutput, TensorRole::kLse, TensorRole::kGradQ,
                                 TensorRole::kGradK, TensorRole::kGradV};

// min(k * (1 + 4/sqrt(N)) * e(non-SP) + (c + 1/sqrt(N)) * u * |magnitude| / |oracle|,
//     C * u * |magnitude| / |oracle|)
double documented_limit(const Budget& b, int64_t n, double reference, double u, double magnitude) {
  const double few = 1 / std::sqrt(static_cast<double>(n));
  return std::min(b.k * (1 + 4 * few) * reference + (b.c + few) * u * magnitude,
                  b.ceiling * u * magnitude);
}

TEST_CASE("budget: the limit is the documented one and decides", "[verify][budget]") {
  for (const int64_t n : {100, 10000}) {
    const Sample sample(n);
    for (const TensorRole role : kRoles) {
      for (const c10::ScalarType dtype : all_dtypes()) {
        for (const double reference : {0.0, 1e-9, 1e-3}) {
          for (const double magnitude : {1.0, 50.0}) {
            // The log-sum-exp is never kept in less than fp32.
            const bool wide = role == TensorRole::kLse && dtype != at::kDouble;
            const double u = wide ? unit_roundoff(at::kFloat) : unit_roundoff(dtype);
            const double limit =
                documented_limit(budget_of(role, dtype), n, reference, u, magnitude);
            INFO("N " << n << ", role " << static_cast<int>(role) << ", " << dtype_name(dtype)
                      << ", reference " << reference << ", magnitude " << magnitude);
            for (const auto& [factor, expected] :
                 {std::pair(0.99, Status::kPass), std::pair(1.01, Status::kFail)}) {
              const Judgement j =
                  sample.judge_these(sample.with_error(factor * limit),
                                     sample.with_error(reference), role, dtype, magnitude);
              // In fp64 the sample's own rounding is a part of the error.
              CHECK(j.result.limit == Approx(limit).epsilon(1e-4).margin(2e-15));
              CHECK(j.result.error == Approx(factor * limit).epsilon(1e-4).margin(2e-16));
              if (limit > 1e-14) CHECK(j.result.status == expected);
            }
          }
        }
      }
    }
  }
}

TEST_CASE("budget: a worse reference allows more, lower precision too", "[verify][budget]") {
  const Sample sample(4096);
  const auto limit = [&](double reference, c10::ScalarType dtype, TensorRole role) {
    return sample.judge_these(sample.oracle, sample.with_error(reference), role, dtype)
        .result.limit;
  };
  for (const TensorRole role : kRoles) {
    CHECK(limit(1e-5, at::kFloat, role) > 1.5 * limit(5e-6, at::kFloat, role));
    CHECK(limit(0, at::kFloat, role) > 1e6 * limit(0, at::kDouble, role));
  }
  CHECK(limit(0, at::kBFloat16, TensorRole::kOutput) >
        7 * limit(0, at::kHalf, TensorRole::kOutput));
}

// An error that is a scale shows in the ratio long before it shows in the norm.
TEST_CASE("budget: scale errors", "[verify][budget]") {
  const Sample sample(100000);
  const double reference = 1e-5;
  const Tensor plain = sample.with_error(reference);
  for (const TensorRole role : kRoles) {
    const Judgement right =
        sample.judge_these(sample.with_error(reference), plain, role, at::kFloat);
    CHECK(right.result.status == Status::kPass);
    for (const double sign : {1.0, -1.0}) {
      // ratio_limit = k |ratio(non-SP) - 1| + 0.1 e(non-SP) + 5/sqrt(N) limit + floor
      const double limit = right.result.ratio_limit;
      CHECK(limit == Approx(0.1 * reference + 5 / std::sqrt(1e5) * right.result.limit +
                            (budget_of(role, at::kFloat).c + 1 / std::sqrt(1e5)) * 0x1p-24)
                         .epsilon(1e-6));
      const Judgement inside =
          sample.judge_these(plain + sample.oracle * (sign * 0.95 * limit), plain, role);
      CHECK(inside.result.status == Status::kPass);
      const Judgement outside =
          sample.judge_these(plain + sample.oracle * (sign * 1.05 * limit), plain, role);
      INFO("ratio " << outside.result.ratio << ", error " << outside.result.error << " of "
                    << outside.result.limit);
      CHECK(outside.result.error < outside.result.limit);  // the norm alone would let it pass
      CHECK(outside.result.status == Status::kFail);
      CHECK(outside.result.ratio == Approx(1 + sign * 1.05 * limit).epsilon(1e-9));
    }
    // A reference with a bias of its own allows as much again.
    const Tensor biased = plain + sample.oracle * 1e-5;
    CHECK(sample.judge_these(biased, biased, role).result.status == Status::kPass);
  }
  for (const double factor : {0.25, 0.5, 2.0, 4.0, -1.0, 0.0}) {
    INFO("factor " << factor);
    const Judgement j = sample.judge_these(plain * factor, plain);
    CHECK(j.result.status == Status::kFail);
    CHECK(j.result.ratio == Approx(factor).margin(1e-9));
  }
}

// Queries that see one key: dq = 0 is left of summands that are not.
TEST_CASE("budget: gradients that cancel are held to what cancelled", "[verify][budget]") {
  const int64_t n = 400;
  const std::vector<double> oracle(n, 0.0), magnitude(n, 3.0);
  Judged t;
  t.name = "q:grad", t.role = TensorRole::kGradQ, t.dtype = at::kFloat;
  t.oracle = oracle, t.magnitude = magnitude;
  t.reference = at::full({n}, 3e-7, at::kDouble);  // errs by 1e-7 of the summands
  const double limit = documented_limit(budget_of(t.role, t.dtype), n, 1e-7, 0x1p-24, 1);
  for (const auto& [factor, expected] :
       {std::pair(0.0, Status::kPass), std::pair(0.99, Status::kPass),
        std::pair(1.01, Status::kFail), std::pair(1e5, Status::kFail)}) {
    t.result = at::full({n}, 3 * factor * limit, at::kDouble);
    const Judgement j = judge(t);
    INFO("factor " << factor << ", error " << j.result.error << ", limit " << j.result.limit);
    CHECK(j.result.limit == Approx(limit));
    CHECK(j.result.error == Approx(factor * limit).margin(1e-20));
    CHECK(j.result.status == expected);
    CHECK(j.result.ratio == 1);
    CHECK(j.broken_zeros == 0);
  }
}

TEST_CASE("budget: zeros to which nothing adds up stay zeros", "[verify][budget]") {
  const Sample sample(1000);
  std::vector<double> oracle = sample.oracle_values, magnitude = values(sample.oracle.abs());
  for (size_t i = 100; i < 110; ++i) oracle[i] = magnitude[i] = 0;
  Judged t;
  t.name = "k:grad", t.role = TensorRole::kGradK, t.dtype = at::kFloat;
  t.oracle = oracle, t.magnitude = magnitude;
  t.reference = at::tensor(oracle, at::kDouble);
  t.result = t.reference.clone();
  CHECK(judge(t).result.status == Status::kPass);
  t.result[103] = -0.0;
  CHECK(judge(t).result.status == Status::kPass);
  for (const double tiny : {1e-300, -1e-12, kNaN}) {
    t.result = t.reference.clone();
    t.result[103] = tiny;
    INFO("element " << tiny);
    CHECK(judge(t).result.status == Status::kFail);
    CHECK(judge(t).broken_zeros == 1);
    t.result[108] = tiny;
    CHECK(judge(t).broken_zeros == 2);
  }
  // All of them zero: a tensor of masked keys.
  const std::vector<double> zeros(50, 0.0);
  t.oracle = t.magnitude = zeros;
  t.reference = t.result = at::zeros({50}, at::kDouble);
  CHECK(judge(t).result.status == Status::kPass);
  t.result = at::zeros({50}, at::kDouble);
  t.result[0] = 1e-30;
  CHECK(judge(t).result.status == Status::kFail);
}

TEST_CASE("budget: NaN and infinity fail wherever they are", "[verify][budget]") {
  const Sample sample(500);
  for (const double poison : {kNaN, kInf, -kInf}) {
    for (const int64_t at : {0, 250, 499}) {
      Tensor result = sample.oracle.clone();
      result[at] = poison;
      // Not even a reference as bad as can be makes up for it.
      for (const double reference : {0.0, 1.0}) {
        const Judgement j = sample.judge_these(result, sample.with_error(reference));
        CHECK(j.result.status == Status::kFail);
        CHECK(j.result.error == kInf);
        CHECK(j.result.max_abs_index == std::vector<int64_t>{at});
      }
    }
  }
}

// The local attention is common to both runs: if it is wrong, they are wrong alike.
TEST_CASE("budget: a reference that is itself wrong allows no more than the ceiling",
          "[verify][budget]") {
  const Sample sample(2000);
  for (const TensorRole role : kRoles) {
    for (const c10::ScalarType dtype : all_dtypes()) {
      INFO("role " << static_cast<int>(role) << ", " << dtype_name(dtype));
      for (const Tensor& wrong : {sample.with_error(0.05), sample.with_error(1),
                                  sample.oracle * 1.1, sample.oracle * 0.5}) {
        const Judgement j = sample.judge_these(wrong, wrong, role, dtype);
        INFO("error " << j.result.error << ", limit " << j.result.limit);
        CHECK(j.result.status == Status::kFail);
      }
      // The SP result may be right all the same.
      CHECK(sample.judge_these(sample.oracle, sample.with_error(1), role, dtype).result.status ==
            Status::kPass);
    }
  }
}

// Its error is infinite, and so would be what it allows.
TEST_CASE("budget: nothing can be held to a reference that is not finite", "[verify][budget]") {
  const Sample sample(500);
  for (const double poison : {kNaN, kInf}) {
    Tensor reference = sample.oracle.clone();
    reference[7] = poison;
    CHECK(sample.judge_these(sample.oracle * 100, reference).result.status == Status::kError);
    CHECK(sample.judge_these(sample.oracle, reference).result.status == Status::kError);
  }
}

TEST_CASE("budget: rows without a key have a log-sum-exp of -inf", "[verify][budget]") {
  std::vector<double> oracle(64, 2.0);
  oracle[5] = oracle[6] = -kInf;
  Judged t;
  t.name = "lse", t.role = TensorRole::kLse, t.dtype = at::kBFloat16;
  t.oracle = oracle;
  t.reference = at::tensor(oracle, at::kDouble).to(at::kFloat);
  t.result = t.reference.clone();
  CHECK(judge(t).result.status == Status::kPass);
  for (const double wrong : {0.0, -1e30, kInf}) {
    t.result = t.reference.clone();
    t.result[5] = wrong;
    CHECK(judge(t).result.status == Status::kFail);
  }
  t.result = t.reference.clone();
  t.result[9] = -kInf;
  CHECK(judge(t).result.status == Status::kFail);
}

// A log-sum-exp near zero is a sum of numbers near one: |oracle| alone would allow nothing.
TEST_CASE("budget: a log-sum-exp near zero is held to 1", "[verify][budget]") {
  const std::vector<double> oracle(256, 1e-6);
  Judged t;
  t.name = "lse", t.role = TensorRole::kLse, t.dtype = at::kFloat;
  t.oracle = oracle;
  t.reference = at::full({256}, 1e-6, at::kDouble);
  t.result = at::full({256}, 1e-6 + 1e-7, at::kDouble);
  CHECK(judge(t).result.status == Status::kPass);
  t.result = at::full({256}, 1e-6 + 1e-6, at::kDouble);
  CHECK(judge(t).result.status == Status::kFail);
}

TEST_CASE("budget: what a verdict says of a tensor", "[verify][budget]") {
  std::vector<double> oracle(24, 1.0);
  Judged t;
  t.name = "image.q:grad", t.role = TensorRole::kGradQ, t.dtype = at::kHalf;
  t.oracle = oracle;
  t.reference = at::ones({2, 3, 4}, at::kHalf);
  t.result = at::ones({2, 3, 4}, at::kHalf);
  t.result[1][2][0] = 1.5;
  const TensorResult r = judge(t).result;
  CHECK(r.name == "image.q:grad");
  CHECK(r.shape == std::vector<int64_t>{2, 3, 4});
  CHECK(r.dtype == "fp16");
  CHECK(r.max_abs == Approx(0.5));
  CHECK(r.max_abs_index == std::vector<int64_t>{1, 2, 0});
  CHECK(r.error == Approx(0.5 / std::sqrt(24.0)));
  CHECK(r.reference_error == 0);
  CHECK(r.status == Status::kFail);
}

}  // namespace
}  // namespace shardproof::verify
