#include "models/layers.h"

#include <ATen/ATen.h>

#include <cmath>

namespace shardproof::models {
namespace {

using at::Tensor;

bool is_low(at::ScalarType type) { return type == at::kBFloat16 || type == at::kHalf; }

// The dtype that a cast to float32 gives under the policy.
at::ScalarType float32_of(at::ScalarType type, DtypePolicy policy) {
  return policy == DtypePolicy::kFaithful ? at::kFloat : type;
}

}  // namespace

Tensor Scope::linear(const std::string& name, const Tensor& x) const {
  Tensor y = at::linear(x, tensor(name + ".weight"), tensor(name + ".bias"));
  if (contains(name + ".lora_A.weight")) {
    const Tensor low = at::linear(x, tensor(name + ".lora_A.weight"));
    y = y + at::linear(low, tensor(name + ".lora_B.weight")) * parameters_->adapter_scale();
  }
  return y;
}

Tensor Scope::silu_mlp(const std::string& name, const Tensor& x) const {
  return at(name).linear("linear_2", at::silu(at(name).linear("linear_1", x)));
}

Tensor Scope::gelu_mlp(const std::string& name, const Tensor& x) const {
  return at(name).linear("linear_2", gelu_tanh(at(name).linear("linear_1", x)));
}

Tensor Scope::feed_forward(const std::string& name, const std::string& stream,
                           const Tensor& x) const {
  const Scope ff = at(name);
  return ff.linear("net.2", ff.dropout("net.1", stream, gelu_tanh(ff.linear("net.0.proj", x))));
}

Tensor Scope::attention_out(const std::string& stream, const Tensor& x) const {
  return dropout("to_out.1", stream, linear("to_out.0", x));
}

Tensor Scope::dropout(const std::string& name, const std::string& stream, const Tensor& x) const {
  return dropout_ ? dropout_->apply(prefix_ + name, stream, x) : x;
}

Tensor gelu_tanh(const Tensor& x) { return at::gelu(x, "tanh"); }

Tensor layer_norm(const Tensor& x) { return at::layer_norm(x, {x.size(-1)}, {}, {}, kEpsilon); }

Tensor layer_norm_fp32(const Tensor& x, const Tensor& weight, const Tensor& bias,
                       DtypePolicy policy) {
  const at::ScalarType type = float32_of(x.scalar_type(), policy);
  const auto as = [&](const Tensor& t) { return t.defined() ? t.to(type) : t; };
  return at::layer_norm(x.to(type), {x.size(-1)}, as(weight), as(bias), kEpsilon)
      .to(x.scalar_type());
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, RmsNormKind kind, DtypePolicy policy) {
  if (policy == DtypePolicy::kFaithful && kind == RmsNormKind::kTorch) {
    return at::rms_norm(x, {x.size(-1)}, weight, kEpsilon);
  }
  const Tensor wide = x.to(float32_of(x.scalar_type(), policy));
  const Tensor variance = wide.square().mean({-1}, /*keepdim=*/true);
  Tensor y = wide * at::rsqrt(variance + kEpsilon);
  // The cast before the product is diffusers'; without 16-bit weights nothing is rounded there.
  if (is_low(weight.scalar_type())) y = y.to(weight.scalar_type());
  return (y * weight).to(x.scalar_type());
}

Tensor modulate(const Tensor& x, const Tensor& shift, const Tensor& scale) {
  return x * (1 + scale) + shift;
}

Tensor timestep_sinusoid(const Tensor& timestep, int64_t channels, double factor,
                         at::ScalarType dtype, DtypePolicy policy) {
  const at::ScalarType type = float32_of(dtype, policy);
  const int64_t half = channels / 2;
  const Tensor exponent =
      at::arange(half, timestep.options().dtype(type)) * (-std::log(10000.0)) / half;
  Tensor argument = timestep.to(type).unsqueeze(1) * at::exp(exponent).unsqueeze(0);
  if (factor != 1) argument = argument * factor;
  return at::cat({at::cos(argument), at::sin(argument)}, 1).to(dtype);
}

Tensor split_heads(const Tensor& x, int64_t heads) { return x.unflatten(-1, {heads, -1}); }
Tensor merge_heads(const Tensor& x) { return x.flatten(-2); }

}  // namespace shardproof::models
