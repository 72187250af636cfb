// The layers that diffusion transformers are made of, as functions of named parameters.
// Source of all conventions: the files of diffusers 0.42.1 that are named at each function.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "models/dropout.h"
#include "models/parameters.h"

namespace shardproof::models {

// Which arithmetic intermediates are computed in.
enum class DtypePolicy {
  kReference,  // everything in the parameters' dtype (real fp64 with fp64 parameters)
  kFaithful    // casts where diffusers casts: sinusoids, RoPE and norms in fp32
};

// Parameters under a name prefix: scope["to_q"] is weight and bias of <prefix>to_q.
class Scope {
 public:
  // `dropout` may be null: none.
  Scope(const ParameterSet& parameters, DtypePolicy policy,
        std::shared_ptr<const StreamDropout> dropout, std::string prefix = {})
      : parameters_(&parameters),
        policy_(policy),
        dropout_(std::move(dropout)),
        prefix_(std::move(prefix)) {}
  Scope at(const std::string& name) const {
    return Scope(*parameters_, policy_, dropout_, prefix_ + name + ".");
  }
  DtypePolicy policy() const { return policy_; }
  const std::string& prefix() const { return prefix_; }
  const at::Tensor& tensor(const std::string& name) const { return (*parameters_)[prefix_ + name]; }
  bool contains(const std::string& name) const { return parameters_->contains(prefix_ + name); }

  // x W^T + b, plus the LoRA adapter's (alpha/rank) (x A^T) B^T where there is one.
  at::Tensor linear(const std::string& name, const at::Tensor& x) const;
  // linear_2(act(linear_1(x))), act = SiLU or tanh GELU (TimestepEmbedding,
  // PixArtAlphaTextProjection in models/embeddings.py).
  at::Tensor silu_mlp(const std::string& name, const at::Tensor& x) const;
  at::Tensor gelu_mlp(const std::string& name, const at::Tensor& x) const;
  // net.2(net.1(gelu_tanh(net.0.proj(x)))), net.1 = dropout (models/attention.py, FeedForward), on
  // this rank's rows of `stream`.
  at::Tensor feed_forward(const std::string& name, const std::string& stream,
                          const at::Tensor& x) const;
  // Of an attention's scope: to_out.1(to_out.0(x)), to_out.1 = dropout.
  at::Tensor attention_out(const std::string& stream, const at::Tensor& x) const;

 private:
  at::Tensor dropout(const std::string& name, const std::string& stream, const at::Tensor& x) const;

  const ParameterSet* parameters_;
  DtypePolicy policy_;
  std::shared_ptr<const StreamDropout> dropout_;
  std::string prefix_;
};

inline constexpr double kEpsilon = 1e-6;

at::Tensor gelu_tanh(const at::Tensor& x);

// No affine part.
at::Tensor layer_norm(const at::Tensor& x);
// In fp32 under kFaithful (FP32LayerNorm), with affine part where weight is defined.
at::Tensor layer_norm_fp32(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                           DtypePolicy policy);

// Over the last dimension. diffusers' own RMSNorm (QwenImage, SD3; models/normalization.py) rounds
// to a 16-bit weight's dtype before the product with the weight; torch's (Flux, Wan) once, after
// it.
enum class RmsNormKind { kDiffusers, kTorch };
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, RmsNormKind kind,
                    DtypePolicy policy);

// x * (1 + scale) + shift; scale and shift broadcast.
at::Tensor modulate(const at::Tensor& x, const at::Tensor& shift, const at::Tensor& scale);

// [N] -> [N, channels]: cos first, then sin, frequencies exp(-ln(10000) k / (channels/2)), the
// argument multiplied by `factor` after the product with the frequency (get_timestep_embedding,
// flip_sin_to_cos=True, downscale_freq_shift=0). fp32 under kFaithful, then cast to `dtype`.
at::Tensor timestep_sinusoid(const at::Tensor& timestep, int64_t channels, double factor,
                             at::ScalarType dtype, DtypePolicy policy);

// [B,S,H*D] <-> [B,S,H,D]
at::Tensor split_heads(const at::Tensor& x, int64_t heads);
at::Tensor merge_heads(const at::Tensor& x);

}  // namespace shardproof::models
