#include "attention/local_attention.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>

#include "attention/fused_attention.h"
#include "base/error.h"

namespace shardproof::attention {

at::ScalarType accumulate_type(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// [B,S,H,D] -> [B,H,S,D] in the accumulate type, KV heads repeated for their query heads.
at::Tensor to_math(const at::Tensor& x, int64_t repeat) {
  at::Tensor y = x.transpose(1, 2).to(accumulate_type(x.scalar_type()));
  return repeat == 1 ? y : y.repeat_interleave(repeat, 1);
}

// Sums the gradients of a KV head's query heads; back to [B,S,Hk,D] in the dtype of `like`.
at::Tensor from_math(const at::Tensor& grad, const at::Tensor& like, int64_t repeat) {
  at::Tensor g = grad;
  if (repeat != 1) {
    g = g.reshape({g.size(0), g.size(1) / repeat, repeat, g.size(2), g.size(3)}).sum(2);
  }
  return g.transpose(1, 2).to(like.scalar_type()).contiguous();
}

at::Tensor masked_logits(const at::Tensor& q, const at::Tensor& k, const at::Tensor& key_mask,
                         double scale) {
  at::Tensor logits = at::matmul(q, k.transpose(-2, -1)).mul_(scale);
  if (key_mask.defined()) {
    logits.masked_fill_(key_mask.logical_not().unsqueeze(1).unsqueeze(1), -kInf);
  }
  return logits;
}

// Plain matrix arithmetic in the accumulate type: any device and dtype, memory grows with Sq x Sk.
class MathAttention final : public LocalAttention {
 public:
  std::string name() const override { return "math"; }

  AttentionOutput forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& key_mask, double scale) const override {
    const int64_t repeat = q.size(2) / std::max<int64_t>(1, k.size(2));
    const at::Tensor logits = masked_logits(to_math(q, 1), to_math(k, repeat), key_mask, scale);
    at::Tensor lse = k.size(1) == 0
                         ? at::full({q.size(0), q.size(2), q.size(1)}, -kInf, logits.options())
                         : at::logsumexp(logits, {-1});
    const at::Tensor p = probabilities(logits, lse);
    const at::Tensor out = at::matmul(p, to_math(v, repeat));
    return {out.transpose(1, 2).to(q.scalar_type()).contiguous(), lse};
  }

  AttentionGradients backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                              const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                              const at::Tensor& key_mask, double scale) const override {
    if (q.numel() == 0 || k.numel() == 0) {
      return {at::zeros_like(q), at::zeros_like(k), at::zeros_like(v)};
    }
    const int64_t repeat = q.size(2) / std::max<int64_t>(1, k.size(2));
    const at::Tensor qm = to_math(q, 1), km = to_math(k, repeat), vm = to_math(v, repeat);
    const at::Tensor dom = to_math(dout, 1);
    const at::Tensor p = probabilities(masked_logits(qm, km, key_mask, scale), lse);
    const at::Tensor delta = (dom * to_math(out, 1)).sum(-1, /*keepdim=*/true);
    const at::Tensor dlogits = (at::matmul(dom, vm.transpose(-2, -1)) - delta).mul_(p);
    return {from_math(at::matmul(dlogits, km).mul_(scale), q, 1),
            from_math(at::matmul(dlogits.transpose(-2, -1), qm).mul_(scale), k, repeat),
            from_math(at::matmul(p.transpose(-2, -1), dom), v, repeat)};
  }

 private:
  // exp(logits - lse); rows with lse = -inf (no key) are zeros.
  static at::Tensor probabilities(const at::Tensor& logits, const at::Tensor& lse) {
    return at::exp(logits - lse.masked_fill(lse.eq(-kInf), kInf).unsqueeze(-1));
  }
};

bool is_low_precision(at::ScalarType dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf; }

std::string backends_that(bool masked, at::ScalarType dtype, const char* device) {
  std::string names;
  for (const LocalBackendInfo& info : local_backends()) {
    const bool dtype_ok = dtype == at::kDouble  ? info.fp64
                          : dtype == at::kFloat ? info.fp32
                                                : is_low_precision(dtype) && info.low_precision;
    if (!dtype_ok || (masked && !info.takes_mask)) continue;
    if (info.device != "any" && info.device != device) continue;
    names += (names.empty() ? "" : ", ") + std::string(info.name);
  }
  return names;
}

}  // namespace

const std::vector<LocalBackendInfo>& local_backends() {
  static const std::vector<LocalBackendInfo> backends = {
      {"math", "any", true, true, true, true, true, "memory grows with Sq x Sk"},
      {"cpu_flash", "cpu", true, true, true, true, true, "bitwise only with one intra-op thread"},
      {"cuda_flash", "cuda", false, false, false, true, false, "dq varies between runs"},
      {"cudnn", "cuda", true, false, false, true, false, "dq varies between runs"},
      {"efficient", "cuda", true, false, true, true, true, ""},
  };
  return backends;
}

std::shared_ptr<const LocalAttention> make_local_attention(std::string_view name, at::Device device,
                                                           at::ScalarType dtype, bool masked) {
  const char* device_name = device.is_cuda() ? "cuda" : "cpu";
  if (backends_that(false, dtype, device_name).empty()) {
    bad_input("no attention backend computes in {}; expected Double, Float, BFloat16 or Half",
              c10::toString(dtype));
  }
  if (name == "auto") {
    name = !device.is_cuda() ? "cpu_flash" : is_low_precision(dtype) ? "cudnn" : "math";
  }
  for (const LocalBackendInfo& info : local_backends()) {
    if (info.name != name) continue;
    const std::string usable = backends_that(masked, dtype, device_name);
    if (info.device != "any" && info.device != device_name) {
      bad_input("attention backend '{}' runs on {}; on {} choose one of: {}", name, info.device,
                device_name, usable);
    }
    if (masked && !info.takes_mask) {
      bad_input("attention backend '{}' takes no mask; choose one of: {}", name, usable);
    }
    if (usable.find(name) == std::string::npos) {
      bad_input("attention backend '{}' does not compute in {}; choose one of: {}", name,
                c10::toString(dtype), usable);
    }
    if (name == "math") return std::make_shared<MathAttention>();
    return make_fused_attention(name);
  }
  std::string known;
  for (const auto& info : local_backends()) known += " " + std::string(info.name);
  bad_input("no attention backend '{}'; known: auto{}", name, known);
}

}  // namespace shardproof::attention
