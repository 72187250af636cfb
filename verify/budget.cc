#include "verify/budget.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "attention/local_attention.h"
#include "base/error.h"
#include "verify/dtype.h"
#include "verify/oracle/error_norms.h"

namespace shardproof::verify {
namespace {

// Row: role; columns: fp64, fp32, 16-bit. Calibrated on correct random cases (docs/design.md,
// Budgets). The 16-bit output is the sharpest: correct rings err 1.2 to 1.43 times their reference
// where N >= 2000, a merge in 16-bit arithmetic 1.69 times and more. The log-sum-exp of a 16-bit
// attention is off by up to 6e-5 a block on a CPU: the fused kernel's fast exponential.
// In fp64 and fp32 c also covers the merge's weights exp(lse - lse'), which are off by u * |lse|:
// goldens with logits up to 80 on 16 ring ranks reach 1.5 times what k = 2, c = 4 would allow.
// Ceilings: over 3,000 random cases, the suite and the goldens the CPU's non-SP runs err at most 5
// in these units (21 for logits up to 80) in fp64 and fp32, 0.55 in 16 bits, 900 in the log-sum-exp
// of the latter.
// Models: over the suite (495 cases, 37,000 tensors) fp64 errs at most 19 u in outputs, 92 u in
// gradients and 2,400 u in those of conditioning numbers; in the other dtypes gradients err at most
// 2.1 times the larger of their own and the typical error without SP.
constexpr Budget kTable[9][3] = {
    /* output */ {{3.0, 16.0, 1e3}, {3.0, 16.0, 1e3}, {1.4, 0.02, 8.0}},
    /* lse    */ {{3.0, 16.0, 1e3}, {3.0, 16.0, 1e3}, {2.0, 1200.0, 1e4}},
    /* q:grad */ {{3.0, 16.0, 1e3}, {3.0, 16.0, 1e3}, {1.45, 0.2, 8.0}},
    /* k:grad */ {{3.0, 16.0, 1e3}, {3.0, 16.0, 1e3}, {1.45, 0.2, 8.0}},
    /* v:grad */ {{3.0, 16.0, 1e3}, {3.0, 16.0, 1e3}, {1.45, 0.2, 8.0}},
    /* model output */ {{3.0, 256.0, 1e9}, {2.0, 16.0, 1e5}, {2.0, 0.2, 64.0}},
    /* model grad */
    {{3.0, 1024.0, 1e9, 10.0}, {2.5, 16.0, 1e5, 10.0}, {2.5, 0.2, 128.0, 10.0}},
    // Squares double an error, and AdamW's quotient multiplies that of a gradient near epsilon.
    /* model step */
    {{3.0, 1024.0, 1e9, 10.0}, {2.5, 16.0, 1e5, 10.0}, {5.0, 0.2, 256.0, 10.0}},
    /* conditioning */
    {{3.0, 1024.0, 1e9, 10.0}, {2.5, 16.0, 1e9, 10.0}, {2.5, 0.2, 1e9, 10.0}},
};

std::vector<double> values(const at::Tensor& x) {
  const at::Tensor dense = x.to(at::kDouble).contiguous();
  const double* data = dense.const_data_ptr<double>();
  return {data, data + dense.numel()};
}

double norm(std::span<const double> x) {
  double sum = 0;
  for (double v : x) sum += v * v;
  return std::sqrt(sum);
}

double magnitude_norm(const Judged& t) {
  if (!t.magnitude.empty()) return norm(t.magnitude);
  double sum = 0;
  for (double v : t.oracle) {
    if (std::isfinite(v)) sum += std::max(1.0, v * v);
  }
  return std::sqrt(sum);
}

std::vector<int64_t> unravel(int64_t index, at::IntArrayRef shape) {
  std::vector<int64_t> position(shape.size(), 0);
  for (size_t d = shape.size(); d-- > 0;) {
    position[d] = index % shape[d];
    index /= shape[d];
  }
  return position;
}

int64_t count_broken_zeros(const std::vector<double>& got, std::span<const double> magnitude) {
  int64_t broken = 0;
  for (size_t i = 0; i < magnitude.size(); ++i) broken += magnitude[i] == 0 && got[i] != 0;
  return broken;
}

// How many errors of the tensor are independent. A weight's gradient is a sum of few outer
// products: an error in one of their factors runs through a whole row or column.
double independent_errors(const Judged& t) {
  int64_t count = t.result.numel();
  if (t.role >= TensorRole::kModelGrad) {
    const auto sizes = t.result.sizes();
    count = sizes.empty() ? 1 : *std::max_element(sizes.begin(), sizes.end());
  }
  return std::max<double>(1, static_cast<double>(count));
}

}  // namespace

Budget budget_of(TensorRole role, c10::ScalarType dtype) {
  const int column = dtype == at::kDouble ? 0 : dtype == at::kFloat ? 1 : 2;
  return kTable[static_cast<int>(role)][column];
}

Judgement judge(const Judged& t) {
  const std::vector<double> got = values(t.result), plain = values(t.reference);
  ErrorNorms sp = error_norms(got, t.oracle), ref = error_norms(plain, t.oracle);
  const double magnitude = magnitude_norm(t);
  // Gradients can cancel to exact zeros (a query that sees one key): errors then count against what
  // cancelled, and there is no ratio.
  const bool cancelled = sp.finite && sp.ref_norm == 0 && magnitude > 0;
  if (cancelled) {
    sp.relative_l2 = norm(got) / magnitude;
    ref.relative_l2 = norm(plain) / magnitude;
    sp.ratio = 1;
    sp.ratio_excess = ref.ratio_excess = 0;
  }
  // The log-sum-exp is kept in fp32 or better whatever the dtype.
  const double u =
      unit_roundoff(t.role == TensorRole::kLse ? attention::accumulate_type(t.dtype) : t.dtype);
  const Budget budget = budget_of(t.role, t.dtype);
  const double n = independent_errors(t);
  const double scale = cancelled ? 1 : sp.ref_norm > 0 ? magnitude / sp.ref_norm : 0;
  const double reference_error = std::max(
      ref.relative_l2, t.typical_error * (t.role == TensorRole::kModelConditioning ? scale : 1));
  // Errors of few elements scatter; 1/sqrt(N) terms allow for what luck does to both sides.
  const double floor = (budget.c + 1 / std::sqrt(n)) * u * scale;
  TensorResult result;
  result.name = t.name;
  result.shape = t.result.sizes().vec();
  result.dtype = dtype_name(t.dtype);
  result.nonzero = std::count_if(t.oracle.begin(), t.oracle.end(), [](double x) { return x != 0; });
  result.error = sp.relative_l2;
  result.reference_error = ref.relative_l2;
  result.limit = std::min(budget.k * (1 + 4 / std::sqrt(n)) * reference_error + floor,
                          budget.ceiling * u * scale);
  if (t.fixed_limit) result.limit = *t.fixed_limit;
  result.ratio = sp.ratio;
  result.ratio_limit = budget.k * std::abs(ref.ratio_excess) + 0.1 * reference_error +
                       budget.noise / std::sqrt(n) * result.limit + floor;
  if (t.fixed_limit) result.ratio_limit = *t.fixed_limit;
  result.cosine = sp.cosine;
  result.max_abs = sp.max_abs;
  if (sp.max_abs_index >= 0) result.max_abs_index = unravel(sp.max_abs_index, t.result.sizes());
  const int64_t broken_zeros = count_broken_zeros(got, t.magnitude);
  const bool holds = sp.finite && sp.relative_l2 <= result.limit &&
                     std::abs(sp.ratio_excess) <= result.ratio_limit && broken_zeros == 0;
  // An infinite error of the non-SP run would allow any ratio.
  result.status = !ref.finite ? Status::kError : holds ? Status::kPass : Status::kFail;
  return {result, broken_zeros};
}

std::span<const double> elements(const at::Tensor& x) {
  return {x.const_data_ptr<double>(), static_cast<size_t>(x.numel())};
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::optional<CheckResult> wrong_shape(const std::string& name, const at::Tensor& result,
                                       const at::Tensor& expected) {
  if (result.sizes() == expected.sizes()) return std::nullopt;
  return CheckResult{"coverage", Status::kFail,
                     fmt::format("{} has shape {}; expected {}", name, c10::str(result.sizes()),
                                 c10::str(expected.sizes()))};
}

}  // namespace shardproof::verify
