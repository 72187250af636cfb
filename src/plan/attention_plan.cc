#include "plan/attention_plan.h"

#include <algorithm>

#include "base/error.h"

namespace shardproof::plan {
namespace {

StreamPlan cut_stream(const AttentionPlanOptions::Stream& stream, TokenSplit split, int sp) {
  StreamPlan plan{stream.name, stream.tokens, stream.placement, {}, {}};
  const int64_t largest = (stream.tokens + sp - 1) / sp;
  int64_t at = 0;
  for (int r = 0; r < sp; ++r) {
    // A replicated stream holds all rows anyway, so padding its cut would add nothing.
    const bool padded =
        split == TokenSplit::kPadded && stream.placement == StreamPlacement::kSharded;
    const int64_t rows = padded ? std::min(largest, stream.tokens - at)
                                : stream.tokens / sp + (r < stream.tokens % sp ? 1 : 0);
    plan.shards.push_back({at, at + rows});
    at += rows;
    if (stream.placement == StreamPlacement::kReplicated) {
      plan.local_rows.push_back(stream.tokens);
    } else {
      plan.local_rows.push_back(padded ? largest : rows);
    }
  }
  return plan;
}

// The KV heads that query heads [q.begin, q.end) read. Padding heads read the last KV head: their
// queries are zeros and their outputs are dropped, so any head will do.
HeadShard assign_kv(Interval q, int64_t q_heads, int64_t kv_heads) {
  HeadShard shard;
  shard.q = q;
  const int64_t group = q_heads / kv_heads;
  auto kv_of = [&](int64_t head) { return std::min(head, q_heads - 1) / group; };
  shard.kv = {kv_of(q.begin), kv_of(q.end - 1) + 1};
  const int64_t local_kv = shard.kv.size();
  bool grouped = q.size() % local_kv == 0;
  for (int64_t h = q.begin; h < q.end; ++h) {
    const int64_t local = kv_of(h) - shard.kv.begin;
    shard.kv_of_q.push_back(local);
    grouped = grouped && local == (h - q.begin) / (q.size() / local_kv);
  }
  if (grouped) shard.kv_of_q.clear();
  return shard;
}

std::vector<HeadShard> cut_heads(const AttentionPlanOptions& o) {
  const int64_t u = o.mesh.ulysses;
  const int64_t rest = o.q_heads % u;
  if (rest != 0 && o.head_split == HeadSplit::kEven) {
    bad_input(
        "{} heads cannot be split evenly over ulysses={}; choose the uneven or padded head "
        "split, or a mesh whose ulysses divides the heads",
        o.q_heads, u);
  }
  if (o.q_heads < u && o.head_split == HeadSplit::kUneven) {
    bad_input(
        "{} heads over ulysses={} leaves ranks without a head; choose the padded head split "
        "or put more ranks on the ring dimension",
        o.q_heads, u);
  }
  std::vector<HeadShard> shards;
  int64_t at = 0;
  for (int64_t r = 0; r < u; ++r) {
    const bool padded = o.head_split == HeadSplit::kPadded;
    const int64_t count = padded ? (o.q_heads + u - 1) / u : o.q_heads / u + (r < rest ? 1 : 0);
    shards.push_back(assign_kv({at, at + count}, o.q_heads, o.kv_heads));
    at += count;
  }
  return shards;
}

std::vector<int64_t> rank_major_tokens(const AttentionPlan& plan, int ring_rank) {
  std::vector<int64_t> tokens;
  for (int u = 0; u < plan.mesh.ulysses; ++u) {
    const auto sp_rank = static_cast<size_t>(ring_rank) * static_cast<size_t>(plan.mesh.ulysses) +
                         static_cast<size_t>(u);
    for (size_t s = 0; s < plan.streams.size(); ++s) {
      const Interval rows = plan.streams[s].shards[sp_rank];
      for (int64_t t = rows.begin; t < rows.end; ++t) {
        tokens.push_back(plan.stream_offset(s) + t);
      }
    }
  }
  return tokens;
}

void check_options(const AttentionPlanOptions& o) {
  o.mesh.check();
  if (o.q_heads < 1 || o.kv_heads < 1 || o.q_heads % o.kv_heads != 0) {
    bad_input(
        "{} query heads over {} KV heads: expected at least 1 of each and a whole number of "
        "query heads per KV head",
        o.q_heads, o.kv_heads);
  }
  if (o.streams.empty()) bad_input("an attention plan needs at least one stream");
  for (const auto& stream : o.streams) {
    if (stream.tokens < 0) bad_input("stream '{}' has {} tokens", stream.name, stream.tokens);
  }
}

}  // namespace

int64_t AttentionPlan::joint_tokens() const { return stream_offset(streams.size()); }

int64_t AttentionPlan::stream_offset(size_t stream) const {
  int64_t offset = 0;
  for (size_t s = 0; s < stream; ++s) offset += streams[s].tokens;
  return offset;
}

int64_t AttentionPlan::shard_rows(int sp_rank) const {
  int64_t rows = 0;
  for (const StreamPlan& s : streams) rows += s.shards[static_cast<size_t>(sp_rank)].size();
  return rows;
}

int64_t AttentionPlan::block_rows(int ring_rank) const {
  int64_t rows = 0;
  for (int u = 0; u < mesh.ulysses; ++u) rows += shard_rows(ring_rank * mesh.ulysses + u);
  return rows;
}

AttentionPlan make_attention_plan(const AttentionPlanOptions& options) {
  check_options(options);
  AttentionPlan plan;
  plan.mesh = options.mesh;
  plan.q_heads = options.q_heads;
  plan.kv_heads = options.kv_heads;
  plan.ring_mode = options.ring_mode;
  plan.convention = options.convention;
  for (const auto& stream : options.streams) {
    plan.streams.push_back(cut_stream(stream, options.token_split, plan.sp()));
  }
  plan.heads = cut_heads(options);
  for (int r = 0; r < plan.mesh.ring; ++r) plan.block_tokens.push_back(rank_major_tokens(plan, r));
  return plan;
}

namespace {

// Do all lists have the mesh's lengths? The other checks need that.
void audit_lengths(const AttentionPlan& plan, std::vector<std::string>& problems) {
  const auto check = [&](const std::string& what, size_t length, int expected) {
    if (length == static_cast<size_t>(expected)) return;
    problems.push_back(fmt::format("{} of {} ranks; expected {}", what, length, expected));
  };
  for (const StreamPlan& stream : plan.streams) {
    check(fmt::format("stream '{}': shards", stream.name), stream.shards.size(), plan.sp());
    check(fmt::format("stream '{}': local rows", stream.name), stream.local_rows.size(), plan.sp());
  }
  check("heads per Ulysses rank:", plan.heads.size(), plan.mesh.ulysses);
  check("tokens per ring rank:", plan.block_tokens.size(), plan.mesh.ring);
}

void audit_stream(const StreamPlan& stream, std::vector<std::string>& problems) {
  std::vector<int> owners(static_cast<size_t>(stream.tokens), 0);
  for (size_t r = 0; r < stream.shards.size(); ++r) {
    const Interval rows = stream.shards[r];
    if (rows.begin < 0 || rows.end < rows.begin || rows.end > stream.tokens ||
        rows.size() > stream.local_rows[r]) {
      problems.push_back(fmt::format("stream '{}': SP rank {} owns [{},{}) of {} tokens in {} rows",
                                     stream.name, r, rows.begin, rows.end, stream.tokens,
                                     stream.local_rows[r]));
      continue;
    }
    for (int64_t t = rows.begin; t < rows.end; ++t) ++owners[static_cast<size_t>(t)];
  }
  for (size_t t = 0; t < owners.size(); ++t) {
    if (owners[t] == 1) continue;
    problems.push_back(fmt::format("stream '{}': token {} has {} owners; expected one", stream.name,
                                   t, owners[t]));
    return;  // the first one tells enough
  }
}

// Can the shard's query heads be looked up in its KV heads at all?
bool is_possible(const HeadShard& shard, int64_t kv_heads) {
  const auto q = shard.q.size(), kv = shard.kv.size();
  if (shard.q.begin < 0 || q < 0 || shard.kv.begin < 0 || shard.kv.end > kv_heads) return false;
  if (kv < 1 || (shard.kv_of_q.empty() && q % kv != 0)) return false;
  return shard.kv_of_q.empty() ||
         (static_cast<int64_t>(shard.kv_of_q.size()) == q &&
          std::all_of(shard.kv_of_q.begin(), shard.kv_of_q.end(),
                      [&](int64_t local) { return 0 <= local && local < kv; }));
}

void audit_heads(const AttentionPlan& plan, std::vector<std::string>& problems) {
  std::vector<int> owners(static_cast<size_t>(plan.q_heads), 0);
  const int64_t group = plan.q_heads / plan.kv_heads;
  for (size_t u = 0; u < plan.heads.size(); ++u) {
    const HeadShard& shard = plan.heads[u];
    if (!is_possible(shard, plan.kv_heads)) {
      problems.push_back(fmt::format(
          "Ulysses rank {}: query heads [{},{}) cannot be served by KV heads [{},{}) of "
          "{} through a list of {}",
          u, shard.q.begin, shard.q.end, shard.kv.begin, shard.kv.end, plan.kv_heads,
          shard.kv_of_q.size()));
      continue;
    }
    for (int64_t h = shard.q.begin; h < shard.q.end; ++h) {
      if (h >= plan.q_heads) continue;
      ++owners[static_cast<size_t>(h)];
      const int64_t i = h - shard.q.begin;
      const int64_t local = shard.kv_of_q.empty() ? i / (shard.q.size() / shard.kv.size())
                                                  : shard.kv_of_q[static_cast<size_t>(i)];
      if (shard.kv.begin + local != h / group) {
        problems.push_back(
            fmt::format("Ulysses rank {}: query head {} reads KV head {}; expected "
                        "{}",
                        u, h, shard.kv.begin + local, h / group));
      }
    }
  }
  for (size_t h = 0; h < owners.size(); ++h) {
    if (owners[h] != 1) {
      problems.push_back(fmt::format("query head {} has {} owners; expected one", h, owners[h]));
    }
  }
}

void audit_blocks(const AttentionPlan& plan, std::vector<std::string>& problems) {
  for (int r = 0; r < plan.mesh.ring; ++r) {
    if (plan.block_tokens[static_cast<size_t>(r)] != rank_major_tokens(plan, r)) {
      problems.push_back(
          fmt::format("ring rank {}: key masks are read in another order than the "
                      "tokens are held in",
                      r));
    }
  }
}

}  // namespace

std::vector<std::string> audit(const AttentionPlan& plan) {
  std::vector<std::string> problems;
  audit_lengths(plan, problems);
  if (!problems.empty()) return problems;
  for (const StreamPlan& stream : plan.streams) audit_stream(stream, problems);
  audit_heads(plan, problems);
  audit_blocks(plan, problems);
  return problems;
}

std::string to_table(const AttentionPlan& plan) {
  std::string text = fmt::format("attention plan {}, {} query heads, {} KV heads, {}, {}\n",
                                 plan.mesh.to_string(), plan.q_heads, plan.kv_heads,
                                 to_string(plan.ring_mode), to_string(plan.convention));
  text += fmt::format("{:>7} {:>5} {:>8} {:>12} {:>10}", "SP rank", "ring", "ulysses",
                      "query heads", "KV heads");
  for (const StreamPlan& s : plan.streams) text += fmt::format("  {:>18}", s.name + " rows (pads)");
  for (int r = 0; r < plan.sp(); ++r) {
    const int u = r % plan.mesh.ulysses;
    const HeadShard& heads = plan.heads[static_cast<size_t>(u)];
    text += fmt::format("\n{:>7} {:>5} {:>8} {:>12} {:>10}", r, r / plan.mesh.ulysses, u,
                        fmt::format("[{},{})", heads.q.begin, heads.q.end),
                        fmt::format("[{},{})", heads.kv.begin, heads.kv.end));
    for (const StreamPlan& s : plan.streams) {
      const Interval rows = s.shards[static_cast<size_t>(r)];
      const int64_t pads = s.placement == StreamPlacement::kReplicated
                               ? 0
                               : s.local_rows[static_cast<size_t>(r)] - rows.size();
      text += fmt::format("  {:>18}", fmt::format("[{},{}) ({})", rows.begin, rows.end, pads));
    }
  }
  return text + "\n";
}

const char* to_string(TokenSplit value) {
  return value == TokenSplit::kUneven ? "uneven" : "padded";
}
const char* to_string(HeadSplit value) {
  switch (value) {
    case HeadSplit::kEven:
      return "even";
    case HeadSplit::kUneven:
      return "uneven";
    case HeadSplit::kPadded:
      return "padded";
  }
  return "?";
}
const char* to_string(RingMode value) {
  return value == RingMode::kRotate ? "rotate" : "allgather";
}
const char* to_string(GradientConvention value) {
  switch (value) {
    case GradientConvention::kSliceThenScaleLoss:
      return "A";
    case GradientConvention::kSliceTimesSp:
      return "B";
    case GradientConvention::kSumThenSlice:
      return "C";
  }
  return "?";
}

}  // namespace shardproof::plan
