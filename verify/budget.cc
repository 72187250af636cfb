#include "verify/budget.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "attention/local_attention.h"
#include "verify/dtype.h"
#include "verify/oracle/error_norms.h"

namespace shardproof::verify {
namespace {

// Row: role; columns: fp64, fp32, 16-bit. Measured on 12,000 correct random cases, see
// docs/design.md, Budgets: k is the ratio that errors of larger tensors approach from below, c
// covers what a small tensor's luck adds.
constexpr Budget kTable[5][3] = {
    /* output */ {{2.0, 4.0}, {2.0, 4.0}, {1.45, 0.1}},
    /* lse    */ {{2.0, 4.0}, {2.0, 4.0}, {2.0, 4.0}},
    /* q:grad */ {{2.0, 4.0}, {2.0, 4.0}, {1.45, 0.1}},
    /* k:grad */ {{2.0, 4.0}, {2.0, 4.0}, {1.45, 0.1}},
    /* v:grad */ {{2.0, 4.0}, {2.0, 4.0}, {1.45, 0.1}},
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

}  // namespace

Budget budget_of(TensorRole role, c10::ScalarType dtype) {
  const int column = dtype == at::kDouble ? 0 : dtype == at::kFloat ? 1 : 2;
  return kTable[static_cast<int>(role)][column];
}

Judgement judge(const Judged& t) {
  const std::vector<double> got = values(t.result), plain = values(t.reference);
  const ErrorNorms sp = error_norms(got, t.oracle), ref = error_norms(plain, t.oracle);
  // The log-sum-exp is kept in fp32 or better whatever the dtype.
  const double u =
      unit_roundoff(t.role == TensorRole::kLse ? attention::accumulate_type(t.dtype) : t.dtype);
  const Budget budget = budget_of(t.role, t.dtype);
  TensorResult result;
  result.name = t.name;
  result.shape = t.result.sizes().vec();
  result.dtype = dtype_name(t.dtype);
  result.error = sp.relative_l2;
  result.reference_error = ref.relative_l2;
  const double scale = sp.ref_norm > 0 ? magnitude_norm(t) / sp.ref_norm : 0;
  const double n = std::max<double>(1, static_cast<double>(sp.count));
  const double luck = 1 + 4 / std::sqrt(n);
  result.limit = budget.k * luck * ref.relative_l2 + budget.c * u * scale;
  result.ratio = sp.ratio;
  result.ratio_limit = std::abs(ref.ratio_excess) + (0.1 + 5 / std::sqrt(n)) * ref.relative_l2 +
                       budget.c * u * scale;
  result.cosine = sp.cosine;
  result.max_abs = sp.max_abs;
  if (sp.max_abs_index >= 0) result.max_abs_index = unravel(sp.max_abs_index, t.result.sizes());
  const int64_t broken_zeros = count_broken_zeros(got, t.magnitude);
  const bool holds = sp.finite && sp.relative_l2 <= result.limit &&
                     std::abs(sp.ratio_excess) <= result.ratio_limit && broken_zeros == 0;
  result.status = holds ? Status::kPass : Status::kFail;
  return {result, broken_zeros};
}

}  // namespace shardproof::verify
