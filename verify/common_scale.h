// A factor that all gradients of a case have in common, as a wrong division gives them: seen where
// no single tensor can show it.
//
// In 16 bits a tensor's own ratio is allowed to be off by what rounding does to one tensor. Over
// all gradients of a case the mean of the ratios, each weighted by the inverse of its variance
// e(non-SP)^2 / N, is much better known. With u the unit round-off and s the standard deviation of
// that mean:
//   |mean ratio - 1| <= 0.4 u + 15 s   of attention
//                       2.5 u + 15 s   of models and training, whose errors have causes in common
// Calibrated on correct runs: at most 0.16 u and 15 s of 384 attention cases, 1.0 u and 34 s of 152
// of models and training.
#pragma once
#include <c10/core/ScalarType.h>

#include <optional>
#include <vector>

#include "verify/verdict/verdict.h"

namespace shardproof::verify {

// Of bf16 and fp16; nothing in wider types (the tensors' own ratios are sharp there), or where
// there are no gradients whose error is known.
std::optional<CheckResult> check_common_scale(const std::vector<TensorResult>& tensors,
                                              c10::ScalarType dtype);

}  // namespace shardproof::verify
