// How much a result of sequence parallelism may err.
//
// With e(x) = |x - oracle| / |oracle| (relative L2 against fp64) and N elements, a result passes if
//   e(SP) <= limit,  limit = min(k * (1 + 4/sqrt(N)) * e(non-SP) + floor, ceiling)
//   |ratio(SP) - 1| <= k * |ratio(non-SP) - 1| + 0.1 * e(non-SP) + 5/sqrt(N) * limit + floor
//   floor = (c + 1/sqrt(N)) * u * |magnitude| / |oracle|,  ceiling = C * u * |magnitude| / |oracle|
// where ratio is the best-fit scale against the oracle (fused kernels with a fast exponential have
// a small bias of their own), u the unit round-off of the dtype and `magnitude` the same formulas
// on absolute values: a sum's rounding errors scale with its summands. Where the magnitude is zero
// (masked keys, queries that see no key) the result must be exactly zero. k and c come from a table
// per tensor role and dtype, calibrated on correct runs (docs/design.md, Budgets). C is at least
// ten times what correct runs err: it holds to the oracle what both runs share and could both have
// wrong, the local attention. A non-SP result that is not finite makes the tensor an error.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "verify/verdict/verdict.h"

namespace shardproof::verify {

// What of the table a tensor falls under.
enum class TensorRole {
  kOutput,
  kLse,
  kGradQ,
  kGradK,
  kGradV,
  kModelOutput,       // of a whole model or of one of its blocks
  kModelGrad,         // of a parameter or an input of a model
  kModelStep,         // what an optimizer makes of gradients: squares, quotients
  kModelConditioning  // gradient of a number: a timestep, a position; sums of large terms that
                      // cancel
};

struct Budget {
  double k;
  double c;
  double ceiling;    // C
  double noise = 5;  // of the ratio: |ratio - 1| may be noise / sqrt(N) * limit
};
Budget budget_of(TensorRole role, c10::ScalarType dtype);

// One tensor of a case, with all that judging it takes. Values are of the whole tensor.
struct Judged {
  std::string name;
  TensorRole role = TensorRole::kOutput;
  c10::ScalarType dtype = c10::ScalarType::Float;  // of the case
  at::Tensor result;                               // of the SP run
  at::Tensor reference;                            // of the non-SP run in the same dtype
  std::span<const double> oracle;
  std::span<const double> magnitude;  // empty: |oracle| and at least 1
  // Of the non-SP run over all gradients of a model: a tensor of few elements can be right by luck,
  // and then says nothing about the error that another order of summation may have.
  double typical_error = 0;
  std::optional<double> fixed_limit;  // takes the place of the budget (goldens of models)
};

// Told each tensor of a case before it is judged, with all that judging it again takes; the spans
// live only until it returns.
using Observer = std::function<void(const Judged&)>;

struct Judgement {
  TensorResult result;       // all but `where`
  int64_t broken_zeros = 0;  // elements that are not zero although nothing adds up to them
};
Judgement judge(const Judged& tensor);

// What judging whole tensors of a run takes. The elements of a contiguous fp64 tensor; the median,
// 0 of nothing; a failed check if a tensor has not the shape that it should have.
std::span<const double> elements(const at::Tensor& x);
double median(std::vector<double> values);
std::optional<CheckResult> wrong_shape(const std::string& name, const at::Tensor& result,
                                       const at::Tensor& expected);

}  // namespace shardproof::verify
