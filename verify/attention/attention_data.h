// The whole (unsharded) tensors of an attention case and their fp64 reference.
#pragma once
#include <ATen/core/Tensor.h>

#include "verify/attention/attention_case.h"
#include "verify/golden.h"
#include "verify/oracle/attention_oracle.h"

namespace shardproof::verify {

// All replicas' samples together: batch = dp * case.batch; replica i holds the i-th run of samples.
struct AttentionData {
  at::Tensor q, k, v, dout;  // [B,S,H,D] in the case's dtype; k, v with the KV heads
  at::Tensor mask;           // bool [B,S] or undefined
  double scale = 1;
  AttentionReference reference;  // of the rounded inputs
};

// Draws from the case's seed so that errors show: block log-sum-exps that differ by several units
// (a merge that ignores them is far off), cotangents and values without structure, another draw per
// sample.
AttentionData draw_attention_data(const AttentionCase& c);

// The golden's tensors, rounded to the case's dtype. In fp64 and fp32, which hold its inputs
// exactly, the reference is the golden's; below it is the oracle's.
AttentionData golden_attention_data(const AttentionCase& c, const AttentionGolden& golden);

}  // namespace shardproof::verify
