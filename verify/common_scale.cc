#include "verify/common_scale.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "verify/dtype.h"

namespace shardproof::verify {
namespace {

bool of_attention(const TensorResult& t) {
  return t.name == "q:grad" || t.name == "k:grad" || t.name == "v:grad";
}

// Gradients of the first step; those of numbers (a timestep) are what large terms leave.
bool counts(const TensorResult& t) {
  if (!t.name.ends_with(":grad")) return false;
  if (t.name.starts_with("step") && !t.name.starts_with("step0/")) return false;
  constexpr std::array kNumbers = {"timestep:grad", "guidance:grad", "img_ids:grad",
                                   "txt_ids:grad"};
  return std::none_of(kNumbers.begin(), kNumbers.end(),
                      [&](const char* number) { return t.name.ends_with(number); }) &&
         t.reference_error > 0 && std::isfinite(t.ratio);
}

// Errors that are independent of one another: of a weight's gradient as many as its longest side.
// What masks leave nothing of has none.
double independent(const TensorResult& t) {
  if (of_attention(t)) return static_cast<double>(t.nonzero);
  int64_t longest = 1;
  for (const int64_t size : t.shape) longest = std::max(longest, size);
  return static_cast<double>(std::min(longest, t.nonzero));
}

}  // namespace

std::optional<CheckResult> check_common_scale(const std::vector<TensorResult>& tensors,
                                              c10::ScalarType dtype) {
  if (dtype != c10::ScalarType::BFloat16 && dtype != c10::ScalarType::Half) return {};
  double weights = 0, sum = 0;
  bool attention = true;
  for (const TensorResult& t : tensors) {
    if (!counts(t)) continue;
    const double weight = independent(t) / (t.reference_error * t.reference_error);
    weights += weight;
    sum += weight * (t.ratio - 1);
    attention &= of_attention(t);
  }
  if (weights == 0) return {};
  const double mean = sum / weights, deviation = 1 / std::sqrt(weights);
  const double u = unit_roundoff(dtype);
  const double allowed = attention ? 0.4 * u + 15 * deviation : 2.5 * u + 15 * deviation;
  if (std::abs(mean) <= allowed) return CheckResult{"scale", Status::kPass, {}};
  return CheckResult{"scale", Status::kFail,
                     fmt::format("all gradients together are {:.5f} times the reference (allowed "
                                 "1 +- {:.1e})",
                                 1 + mean, allowed)};
}

}  // namespace shardproof::verify
