// LibTorch's fused attention operations behind LocalAttention, with their traps closed.
#pragma once
#include "attention/local_attention.h"

namespace shardproof::attention {

// cpu_flash, cuda_flash, cudnn or efficient.
std::shared_ptr<const LocalAttention> make_fused_attention(std::string_view name);

}  // namespace shardproof::attention
