// Where in a whole tensor of attention the error sits.
#pragma once
#include <ATen/core/Tensor.h>

#include <span>

#include "verify/attention/attention_case.h"
#include "verify/budget.h"
#include "verify/verdict/verdict.h"

namespace shardproof::verify {

// The rank that holds most of the squared error; its worst head if that head has more than half of
// the rank's error, else -1; the range of joint tokens of that rank (and head) that covers the
// elements in error.
//
// `owner`: SP rank by joint token; `error`: squared, [dp*B,S,H].
Location localise_tokens(const comm::MeshShape& mesh, const std::vector<int>& owner,
                         const at::Tensor& error);
Location localise(const AttentionCase& c, TensorRole role, const at::Tensor& result,
                  std::span<const double> oracle);

}  // namespace shardproof::verify
