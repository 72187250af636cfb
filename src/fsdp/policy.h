// How parameters are kept, computed with and summed.
#pragma once
#include <c10/core/ScalarType.h>

#include <functional>
#include <string>

namespace shardproof::fsdp {

struct Policy {
  c10::ScalarType param_dtype = c10::ScalarType::Float;   // what the model computes with
  c10::ScalarType reduce_dtype = c10::ScalarType::Float;  // what gradients are summed in
  c10::ScalarType master_dtype = c10::ScalarType::Float;  // of trained shards and optimizer state

  // Frees a block's parameters after its forward and gathers them again for its backward (ZeRO-3);
  // otherwise they stay until its backward has ended (ZeRO-2 in effect).
  bool reshard_after_forward = true;
  // Gathers the next block while one computes.
  bool prefetch = true;
  // Shards, their gradients and so the optimizer's state live on the host.
  bool offload = false;
  // Parameters that every rank keeps whole; null: none. Buffers always are.
  std::function<bool(const std::string& name)> replicated;

  static Policy uniform(c10::ScalarType dtype) {
    Policy policy;
    policy.param_dtype = policy.reduce_dtype = policy.master_dtype = dtype;
    return policy;
  }
  // Computes in bf16, sums and keeps in fp32 (torch: MixedPrecisionPolicy).
  static Policy mixed() {
    Policy policy;
    policy.param_dtype = c10::ScalarType::BFloat16;
    return policy;
  }
};

}  // namespace shardproof::fsdp
