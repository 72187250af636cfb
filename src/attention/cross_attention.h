// Attention of local queries to keys that every rank holds whole: no communication.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>

#include "attention/local_attention.h"

namespace shardproof::attention {

// q [B,Sq,H,D], k, v [B,Sk,Hk,D] -> [B,Sq,H,D], differentiable; scale 1/sqrt(D). Gradients of k and
// v are those of this rank's queries: their sum over SP ranks is the gradient.
at::Tensor cross_attention(std::shared_ptr<const LocalAttention> local, const at::Tensor& q,
                           const at::Tensor& k, const at::Tensor& v);

}  // namespace shardproof::attention
