#include "verify/attention/expected_trace.h"

#include <fmt/format.h>

#include <map>
#include <numeric>

namespace shardproof::verify {
namespace {

using Counts = std::map<std::string, int64_t>;  // "<kind> <group>" -> calls

// Per rank, forward and backward together.
Counts expected_calls(const AttentionCase& c) {
  Counts counts;
  // q, k, v in one; out; dout; dq, dk, dv one by one.
  if (c.mesh.ulysses > 1) counts["all_to_all ulysses"] = 6;
  if (c.mesh.ring > 1 && c.ring_mode == plan::RingMode::kRotate) {
    // K, V make ring-1 steps in each direction, dK, dV one more to come home.
    counts["send ring"] = counts["recv ring"] = 2 * (c.mesh.ring - 1) + c.mesh.ring;
  } else if (c.mesh.ring > 1) {
    counts["all_gather ring"] = 2;
    counts["reduce_scatter ring"] = 1;
  }
  if (c.text > 0 && c.text_placement == plan::StreamPlacement::kReplicated && c.mesh.sp() > 1) {
    counts["all_gather sp"] = 1;
    if (c.convention == plan::GradientConvention::kSumThenSlice) counts["reduce_scatter sp"] = 1;
  }
  return counts;
}

// Elements that rank `r` must receive through all-to-all: every token of its block, its own heads
// of q, k, v and dout from all members, then its own tokens' heads back.
int64_t expected_all_to_all_elements(const AttentionCase& c, const Ownership& o, int sp_rank) {
  const auto u = static_cast<size_t>(sp_rank % c.mesh.ulysses);
  const auto block = o.block_tokens[static_cast<size_t>(sp_rank / c.mesh.ulysses)].size();
  int64_t rows = 0;
  for (const TokenHome& home : o.text) rows += home.sp_rank == sp_rank;
  for (const TokenHome& home : o.image) rows += home.sp_rank == sp_rank;
  const int64_t q_slots = std::accumulate(o.head_slots.begin(), o.head_slots.end(), int64_t{0});
  const auto kv_of = [&](size_t rank) {  // KV heads that the rank's query heads read
    const auto& heads = o.heads[rank];
    const int64_t group = c.heads / c.kv_heads;
    if (heads.empty()) return int64_t{1};  // heads of zeros read the last KV head
    return heads.back() / group - heads.front() / group + 1;
  };
  int64_t kv_slots = 0;
  for (size_t i = 0; i < o.heads.size(); ++i) kv_slots += kv_of(i);
  const auto in = static_cast<int64_t>(block) * (2 * o.head_slots[u] + 2 * kv_of(u));
  const int64_t out = rows * (2 * q_slots + 2 * kv_slots);
  return c.batch * c.head_dim * (in + out);
}

}  // namespace

CheckResult check_trace(const AttentionCase& c, const Ownership& ownership,
                        const RankWorld& world) {
  const Counts expected = expected_calls(c);
  for (int r = 0; r < world.size(); ++r) {
    Counts found;
    int64_t elements = 0;
    for (const CollectiveCall& call : world.calls(r)) {
      ++found[fmt::format("{} {}", to_string(call.kind), call.group)];
      if (call.kind == CallKind::kAllToAll) {
        elements += std::accumulate(call.receive.begin(), call.receive.end(), int64_t{0});
      }
    }
    for (const auto& [kind, count] : expected) {
      if (found[kind] == count) continue;
      return {
          "trace", Status::kFail,
          fmt::format("rank {} issued {} calls of {}; expected {}", r, found[kind], kind, count)};
    }
    for (const auto& [kind, count] : found) {
      if (expected.contains(kind)) continue;
      return {"trace", Status::kFail,
              fmt::format("rank {} issued {} calls of {}; expected none", r, count, kind)};
    }
    const int64_t due = expected_all_to_all_elements(c, ownership, r % c.mesh.sp());
    if (c.mesh.ulysses > 1 && elements != due) {
      return {"trace", Status::kFail,
              fmt::format("rank {} received {} elements by all_to_all; "
                          "expected {}",
                          r, elements, due)};
    }
  }
  return {"trace", Status::kPass, {}};
}

}  // namespace shardproof::verify
