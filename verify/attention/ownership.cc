#include "verify/attention/ownership.h"

namespace shardproof::verify {
namespace {

// Deals tokens out one by one: rank r gets the next token as long as it holds fewer than its due.
std::vector<TokenHome> deal(int64_t tokens, int sp, bool padded) {
  std::vector<TokenHome> homes;
  int rank = 0;
  int64_t held = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    const auto due = [&](int r) {
      if (padded) return (tokens + sp - 1) / sp;
      return tokens / sp + (r < tokens % sp ? 1 : 0);
    };
    while (held == due(rank)) ++rank, held = 0;
    homes.push_back({rank, held++});
  }
  return homes;
}

std::vector<int64_t> count_rows(const std::vector<TokenHome>& homes, int sp, bool padded,
                                bool replicated) {
  const auto tokens = static_cast<int64_t>(homes.size());
  if (replicated) return std::vector<int64_t>(static_cast<size_t>(sp), tokens);
  if (padded) return std::vector<int64_t>(static_cast<size_t>(sp), (tokens + sp - 1) / sp);
  std::vector<int64_t> rows(static_cast<size_t>(sp), 0);
  for (const TokenHome& home : homes) ++rows[static_cast<size_t>(home.sp_rank)];
  return rows;
}

}  // namespace

Ownership derive_ownership(const AttentionCase& c) {
  const int sp = c.mesh.sp(), u = c.mesh.ulysses;
  const bool padded = c.token_split == plan::TokenSplit::kPadded;
  const bool replicated = c.text_placement == plan::StreamPlacement::kReplicated;
  Ownership o;
  o.text = deal(c.text, sp, padded && !replicated);
  o.image = deal(c.image, sp, padded);
  o.text_rows = count_rows(o.text, sp, padded, replicated);
  o.image_rows = count_rows(o.image, sp, padded, false);

  o.heads.resize(static_cast<size_t>(u));
  const bool pad_heads = c.head_split == plan::HeadSplit::kPadded;
  const std::vector<TokenHome> homes = deal(c.heads, u, pad_heads);
  for (int64_t h = 0; h < c.heads; ++h) {
    o.heads[static_cast<size_t>(homes[static_cast<size_t>(h)].sp_rank)].push_back(h);
  }
  for (const auto& owned : o.heads) {
    o.head_slots.push_back(pad_heads ? (c.heads + u - 1) / u : static_cast<int64_t>(owned.size()));
  }

  o.block_tokens.resize(static_cast<size_t>(c.mesh.ring));
  for (int r = 0; r < sp; ++r) {
    auto& block = o.block_tokens[static_cast<size_t>(r / u)];
    for (size_t t = 0; t < o.text.size(); ++t) {
      if (o.text[t].sp_rank == r) block.push_back(static_cast<int64_t>(t));
    }
    for (size_t t = 0; t < o.image.size(); ++t) {
      if (o.image[t].sp_rank == r) block.push_back(c.text + static_cast<int64_t>(t));
    }
  }
  return o;
}

}  // namespace shardproof::verify
