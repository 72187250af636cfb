// Attention on one device, with the log-sum-exp that lets partial results be merged.
//
// Shapes: q [B,Sq,H,D], k and v [B,Sk,Hk,D] (H a multiple of Hk: query head h reads KV head
// h/(H/Hk)), out like q, lse [B,H,Sq] in fp32 (fp64 for fp64), natural logarithm of the scaled
// logits. The key mask is bool [B,Sk], true = may be attended to; undefined = all. A query that
// sees no key has out = 0, lse = -inf and contributes nothing to any gradient. Zero-sized tensors
// are allowed. What masked keys hold never reaches a result as long as it is finite; callers that
// cannot promise that (poison, padding) clear masked rows first, as SequenceParallelAttention does.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace shardproof::attention {

struct AttentionOutput {
  at::Tensor out;
  at::Tensor lse;
};
struct AttentionGradients {
  at::Tensor dq;
  at::Tensor dk;
  at::Tensor dv;
};

class LocalAttention {
 public:
  virtual ~LocalAttention() = default;
  virtual std::string name() const = 0;
  virtual AttentionOutput forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const at::Tensor& key_mask, double scale) const = 0;
  // `out` and `lse` may be those of a larger attention of which k, v are one block: then the
  // results are this block's share of the gradients (FlashAttention-2, arXiv:2307.08691, algorithm
  // 2; the row constant is sum(dout * out)).
  virtual AttentionGradients backward(const at::Tensor& dout, const at::Tensor& q,
                                      const at::Tensor& k, const at::Tensor& v,
                                      const at::Tensor& out, const at::Tensor& lse,
                                      const at::Tensor& key_mask, double scale) const = 0;
};

// What a backend can do; asking for more is an error that names the backends that can.
struct LocalBackendInfo {
  std::string_view name;
  std::string_view device;  // "cpu", "cuda", "any"
  bool takes_mask;
  bool fp64;
  bool fp32;
  bool low_precision;  // bf16, fp16
  bool deterministic;  // same bits on every run without the deterministic mode
  std::string_view note;
};
const std::vector<LocalBackendInfo>& local_backends();

// Names: math, cpu_flash, cuda_flash, cudnn, efficient. "auto" takes cpu_flash on a CPU; on CUDA
// cudnn for 16-bit types, math for fp32 and fp64. Errors (kBadInput): unknown name, a backend that
// does not run on `device`, in `dtype`, or with a mask.
std::shared_ptr<const LocalAttention> make_local_attention(std::string_view name, at::Device device,
                                                           at::ScalarType dtype, bool masked);

// lse of partial results: fp64 for fp64, else fp32.
at::ScalarType accumulate_type(at::ScalarType dtype);

}  // namespace shardproof::attention
