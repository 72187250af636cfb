#include "attention/fused_attention.h"

#include <ATen/ATen.h>

#include <array>
#include <limits>

#include "base/error.h"

namespace shardproof::attention {
namespace {

using at::Tensor;
constexpr double kInf = std::numeric_limits<double>::infinity();

// The operations want [B,H,S,D] with a dense last dimension; other strides are free.
Tensor heads_first(const Tensor& x) {
  return x.stride(-1) == 1 ? x.transpose(1, 2) : x.contiguous().transpose(1, 2);
}

// Additive mask [B,1,1,Sk] of the queries' dtype (a bool mask is refused or, in one operation,
// silently added as 0/1).
Tensor additive(const Tensor& key_mask, const Tensor& q) {
  return at::zeros(key_mask.sizes(), q.options())
      .masked_fill_(key_mask.logical_not(), -kInf)
      .unsqueeze(1)
      .unsqueeze(1);
}

Tensor expand_kv(const Tensor& x, int64_t repeat) {
  return repeat == 1 ? x : x.repeat_interleave(repeat, 2);
}

Tensor reduce_kv(const Tensor& grad, int64_t repeat) {
  if (repeat == 1) return grad;
  return grad.reshape({grad.size(0), grad.size(1), grad.size(2) / repeat, repeat, grad.size(3)})
      .to(accumulate_type(grad.scalar_type()))
      .sum(3)
      .to(grad.scalar_type());
}

// Closes what is common to all fused operations: empty tensors (the CPU operation dies of SIGFPE),
// head sizes that a kernel does not know (zero channels behind the others change no logit), rows
// that see no key (some operations say lse = 0 for them), lse = -inf in backward (NaN).
class FusedAttention : public LocalAttention {
 public:
  AttentionOutput forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& key_mask,
                          double scale) const final {
    if (q.numel() == 0 || k.numel() == 0) return no_keys(q);
    auto [out, lse] = run_forward(widen(q), widen(k), widen(v), key_mask, scale);
    out = out.narrow(3, 0, q.size(3));
    if (key_mask.defined()) {
      const Tensor unseen = key_mask.any(1).logical_not();  // [B]
      lse = lse.masked_fill(unseen.unsqueeze(1).unsqueeze(1), -kInf);
      out = out.masked_fill(unseen.view({-1, 1, 1, 1}), 0);
    }
    return {out, lse};
  }

  AttentionGradients backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                              const Tensor& out, const Tensor& lse, const Tensor& key_mask,
                              double scale) const final {
    if (q.numel() == 0 || k.numel() == 0) {
      return {at::zeros_like(q), at::zeros_like(k), at::zeros_like(v)};
    }
    const AttentionGradients g =
        run_backward(widen(dout), widen(q), widen(k), widen(v), widen(out),
                     lse.masked_fill(lse.eq(-kInf), kInf), key_mask, scale);
    const int64_t dim = q.size(3);
    return {g.dq.narrow(3, 0, dim), g.dk.narrow(3, 0, dim), g.dv.narrow(3, 0, dim)};
  }

 protected:
  virtual AttentionOutput run_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                      const Tensor& key_mask, double scale) const = 0;
  virtual AttentionGradients run_backward(const Tensor& dout, const Tensor& q, const Tensor& k,
                                          const Tensor& v, const Tensor& out, const Tensor& lse,
                                          const Tensor& key_mask, double scale) const = 0;
  // Head sizes that the operation takes are multiples of this.
  virtual int64_t head_dim_multiple() const { return 8; }

 private:
  Tensor widen(const Tensor& x) const {
    const int64_t missing =
        (-x.size(3) % head_dim_multiple() + head_dim_multiple()) % head_dim_multiple();
    return missing == 0 ? x : at::constant_pad_nd(x, {0, missing});
  }
  static AttentionOutput no_keys(const Tensor& q) {
    return {at::zeros(q.sizes(), q.options()),
            at::full({q.size(0), q.size(2), q.size(1)}, -kInf,
                     q.options().dtype(accumulate_type(q.scalar_type())))};
  }
};

class CpuFlash final : public FusedAttention {
 public:
  std::string name() const override { return "cpu_flash"; }

 private:
  int64_t head_dim_multiple() const override { return 1; }
  static std::optional<Tensor> mask(const Tensor& key_mask, const Tensor& q) {
    if (!key_mask.defined()) return std::nullopt;
    return additive(key_mask, q);
  }

  AttentionOutput run_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                              const Tensor& key_mask, double scale) const override {
    auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
        heads_first(q), heads_first(k), heads_first(v), 0.0, false, mask(key_mask, q), scale);
    return {out.transpose(1, 2), lse};
  }

  AttentionGradients run_backward(const Tensor& dout, const Tensor& q, const Tensor& k,
                                  const Tensor& v, const Tensor& out, const Tensor& lse,
                                  const Tensor& key_mask, double scale) const override {
    auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        heads_first(dout), heads_first(q), heads_first(k), heads_first(v), heads_first(out), lse,
        0.0, false, mask(key_mask, q), scale);
    return {dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)};
  }
};

// The seed and offset of dropout that the CUDA backward operations ask for; dropout is 0.
Tensor no_dropout_state() { return at::empty({0}, at::TensorOptions(at::kLong)); }

class CudaFlash final : public FusedAttention {
 public:
  std::string name() const override { return "cuda_flash"; }

 private:
  AttentionOutput run_forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor&,
                              double scale) const override {
    auto result = at::_scaled_dot_product_flash_attention(heads_first(q), heads_first(k),
                                                          heads_first(v), 0.0, false, false, scale);
    return {std::get<0>(result).transpose(1, 2), std::get<1>(result)};
  }

  AttentionGradients run_backward(const Tensor& dout, const Tensor& q, const Tensor& k,
                                  const Tensor& v, const Tensor& out, const Tensor& lse,
                                  const Tensor&, double scale) const override {
    const Tensor rng = at::zeros({2}, q.options().dtype(at::kUInt64));
    auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_backward(
        heads_first(dout), heads_first(q), heads_first(k), heads_first(v), heads_first(out),
        lse.contiguous(), Tensor(), Tensor(), q.size(1), k.size(1), 0.0, false, rng, rng, scale);
    return {dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)};
  }
};

class Cudnn final : public FusedAttention {
 public:
  std::string name() const override { return "cudnn"; }

 private:
  static Tensor bias(const Tensor& key_mask, const Tensor& q, const Tensor& k) {
    return additive(key_mask, q).expand({q.size(0), q.size(2), q.size(1), k.size(1)});
  }

  AttentionOutput run_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                              const Tensor& key_mask, double scale) const override {
    std::optional<Tensor> attn_bias;
    if (key_mask.defined()) attn_bias = bias(key_mask, q, k);
    auto result = at::_scaled_dot_product_cudnn_attention(
        heads_first(q), heads_first(k), heads_first(v), attn_bias, /*compute_log_sumexp=*/true, 0.0,
        false, false, scale);
    Tensor lse = std::get<1>(result);
    if (lse.dim() == 4) lse = lse.squeeze(-1);
    return {std::get<0>(result).transpose(1, 2), lse};
  }

  AttentionGradients run_backward(const Tensor& dout, const Tensor& q, const Tensor& k,
                                  const Tensor& v, const Tensor& out, const Tensor& lse,
                                  const Tensor& key_mask, double scale) const override {
    if (q.size(1) == 1 && k.size(1) == 1) {  // refused: "s_q = s_kv = 1 is not supported"
      const auto math =
          make_local_attention("math", q.device(), q.scalar_type(), key_mask.defined());
      return math->backward(dout, q, k, v, out, lse, key_mask, scale);
    }
    const Tensor rng = at::zeros({}, q.options().dtype(at::kLong));
    auto [dq, dk, dv] = at::_scaled_dot_product_cudnn_attention_backward(
        heads_first(dout), heads_first(q), heads_first(k), heads_first(v), heads_first(out),
        lse.unsqueeze(-1).contiguous(), rng, rng,
        key_mask.defined() ? bias(key_mask, q, k) : Tensor(), Tensor(), Tensor(), q.size(1),
        k.size(1), 0.0, false, scale);
    return {dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)};
  }
};

class Efficient final : public FusedAttention {
 public:
  std::string name() const override { return "efficient"; }

 private:
  // The kernel reads the bias in rows of a multiple of 16 elements.
  static Tensor bias(const Tensor& key_mask, const Tensor& q, const Tensor& k) {
    const int64_t width = (k.size(1) + 15) / 16 * 16;
    Tensor wide = at::zeros({q.size(0), 1, 1, width}, q.options());
    wide.narrow(3, 0, k.size(1)).copy_(additive(key_mask, q));
    return wide.narrow(3, 0, k.size(1)).expand({q.size(0), q.size(2), q.size(1), k.size(1)});
  }
  static int64_t repeat(const Tensor& q, const Tensor& k) { return q.size(2) / k.size(2); }

  AttentionOutput run_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                              const Tensor& key_mask, double scale) const override {
    std::optional<Tensor> attn_bias;
    if (key_mask.defined()) attn_bias = bias(key_mask, q, k);
    const int64_t n = repeat(q, k);
    auto [out, lse, seed, offset] = at::_scaled_dot_product_efficient_attention(
        heads_first(q), heads_first(expand_kv(k, n)), heads_first(expand_kv(v, n)), attn_bias,
        /*compute_log_sumexp=*/true, 0.0, false, scale);
    return {out.transpose(1, 2), lse.narrow(2, 0, q.size(1))};  // comes padded to a multiple of 32
  }

  AttentionGradients run_backward(const Tensor& dout, const Tensor& q, const Tensor& k,
                                  const Tensor& v, const Tensor& out, const Tensor& lse,
                                  const Tensor& key_mask, double scale) const override {
    const int64_t n = repeat(q, k);
    const int64_t rows = (q.size(1) + 31) / 32 * 32;
    Tensor padded = at::full({q.size(0), q.size(2), rows}, kInf, lse.options());
    padded.narrow(2, 0, q.size(1)).copy_(lse);
    const Tensor rng = no_dropout_state();
    auto [dq, dk, dv, dbias] = at::_scaled_dot_product_efficient_attention_backward(
        heads_first(dout), heads_first(q), heads_first(expand_kv(k, n)),
        heads_first(expand_kv(v, n)), key_mask.defined() ? bias(key_mask, q, k) : Tensor(),
        heads_first(out), padded, rng, rng, 0.0, {true, true, true, false}, false, scale);
    return {dq.transpose(1, 2), reduce_kv(dk.transpose(1, 2), n), reduce_kv(dv.transpose(1, 2), n)};
  }
};

}  // namespace

std::shared_ptr<const LocalAttention> make_fused_attention(std::string_view name) {
  if (name == "cpu_flash") return std::make_shared<CpuFlash>();
  if (name == "cuda_flash") return std::make_shared<CudaFlash>();
  if (name == "cudnn") return std::make_shared<Cudnn>();
  if (name == "efficient") return std::make_shared<Efficient>();
  internal_error("no fused attention '{}'", name);
}

}  // namespace shardproof::attention
