// Merging partial attention results by their log-sum-exp (FlashAttention-2, arXiv:2307.08691,
// section 3.1; ring attention, arXiv:2310.01889).
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>

#include "attention/local_attention.h"

namespace shardproof::attention {

// The result so far over some blocks of keys: out [B,S,H,D] and lse [B,H,S] in the accumulate type.
struct PartialAttention {
  at::Tensor out;
  at::Tensor lse;
};

// Takes one more block's result in. A block in which a query saw no key (lse = -inf) changes
// nothing for it; a query that has seen none so far takes the block as it is.
PartialAttention merge_block(const PartialAttention& so_far, const AttentionOutput& block);

// The same as a value, so that verify can plant a wrong one.
using MergeFunction =
    std::function<PartialAttention(const PartialAttention&, const AttentionOutput&)>;

}  // namespace shardproof::attention
