// Which rank owns which token and head, derived by counting and without the plan's builder: a
// mistake there would otherwise be common to both sides of the comparison.
#pragma once
#include <cstdint>
#include <vector>

#include "verify/attention/attention_case.h"

namespace shardproof::verify {

// Owner of one token: its SP rank and its row among that rank's rows of the stream.
struct TokenHome {
  int sp_rank = 0;
  int64_t row = 0;
};

struct Ownership {
  std::vector<TokenHome> text;  // per token of the stream
  std::vector<TokenHome> image;
  // Per SP rank: rows of its tensors, pads included.
  std::vector<int64_t> text_rows;
  std::vector<int64_t> image_rows;
  std::vector<std::vector<int64_t>> heads;         // per Ulysses rank: real query heads
  std::vector<int64_t> head_slots;                 // per Ulysses rank: heads with padding
  std::vector<std::vector<int64_t>> block_tokens;  // per ring rank: joint tokens, rank-major
};

Ownership derive_ownership(const AttentionCase& c);

}  // namespace shardproof::verify
