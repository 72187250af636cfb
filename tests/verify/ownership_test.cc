// Ownership by brute force against the plan's builder: two derivations that must agree.
#include "verify/attention/ownership.h"

#include "tests/catch.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "base/error.h"
#include "verify/suites/attention_suite.h"

namespace shardproof::verify {
namespace {

using plan::AttentionPlan;
using plan::Interval;

std::string compare_stream(const plan::StreamPlan& stream, const std::vector<TokenHome>& homes,
                           const std::vector<int64_t>& rows) {
  if (static_cast<size_t>(stream.tokens) != homes.size()) return "tokens of " + stream.name;
  if (stream.local_rows != rows) return "local rows of " + stream.name;
  int64_t owned = 0;
  for (const Interval& shard : stream.shards) owned += shard.size();
  if (owned != stream.tokens) return "size of the shards of " + stream.name;
  for (size_t t = 0; t < homes.size(); ++t) {
    const auto token = static_cast<int64_t>(t);
    const Interval shard = stream.shards[static_cast<size_t>(homes[t].sp_rank)];
    if (token < shard.begin || token >= shard.end || token - shard.begin != homes[t].row) {
      return fmt::format("{} token {}", stream.name, t);
    }
  }
  return {};
}

std::string compare_heads(const AttentionPlan& plan, const Ownership& o) {
  const int64_t group = plan.q_heads / plan.kv_heads;
  for (size_t u = 0; u < plan.heads.size(); ++u) {
    const plan::HeadShard& shard = plan.heads[u];
    if (shard.q.size() != o.head_slots[u]) return fmt::format("head slots of rank {}", u);
    std::vector<int64_t> real;
    for (int64_t h = shard.q.begin; h < std::min(shard.q.end, plan.q_heads); ++h) {
      real.push_back(h);
      const int64_t i = h - shard.q.begin;
      const int64_t local = shard.kv_of_q.empty() ? i * shard.kv.size() / shard.q.size()
                                                  : shard.kv_of_q[static_cast<size_t>(i)];
      if (shard.kv.begin + local != h / group) return fmt::format("KV head of query head {}", h);
    }
    if (real != o.heads[u]) return fmt::format("heads of rank {}", u);
    if (shard.kv.begin < 0 || shard.kv.end > plan.kv_heads) return "KV heads that do not exist";
  }
  return {};
}

// The first thing in which plan and ownership differ.
std::string difference(const AttentionCase& c, const AttentionPlan& plan) {
  const Ownership o = derive_ownership(c);
  size_t stream = 0;
  if (c.text > 0) {
    const std::string text = compare_stream(plan.streams[stream++], o.text, o.text_rows);
    if (!text.empty()) return text;
  }
  if (c.image > 0) {
    const std::string image = compare_stream(plan.streams[stream++], o.image, o.image_rows);
    if (!image.empty()) return image;
  }
  if (stream != plan.streams.size()) return "streams";
  const std::string heads = compare_heads(plan, o);
  if (!heads.empty()) return heads;
  return plan.block_tokens == o.block_tokens ? "" : "tokens of the blocks";
}

std::vector<AttentionCase> many_cases() {
  std::vector<AttentionCase> cases = random_attention_cases({}, 11, 4000);
  for (const AttentionCase& c : attention_suite({}, 1, false)) cases.push_back(c);
  return cases;
}

TEST_CASE("ownership: brute force and the plan's builder agree", "[verify][ownership]") {
  int replicated = 0, padded = 0, uneven = 0, lone = 0;
  for (const AttentionCase& c : many_cases()) {
    INFO(c.id());
    CHECK(difference(c, c.make_plan()).empty());
    replicated += c.text_placement == plan::StreamPlacement::kReplicated;
    padded += c.token_split == plan::TokenSplit::kPadded;
    uneven += c.head_split == plan::HeadSplit::kUneven && c.heads % c.mesh.ulysses != 0;
    lone += c.heads < c.mesh.ulysses;
  }
  for (const int count : {replicated, padded, uneven, lone}) CHECK(count >= 100);
}

TEST_CASE("ownership: more ranks than tokens", "[verify][ownership]") {
  for (int64_t tokens = 1; tokens <= 9; ++tokens) {
    for (const auto split : {plan::TokenSplit::kUneven, plan::TokenSplit::kPadded}) {
      AttentionCase c;
      c.mesh = {1, 4, 2};
      c.image = tokens, c.text = 9 - tokens;
      c.token_split = split;
      INFO(c.id());
      CHECK(difference(c, c.make_plan()).empty());
      const Ownership o = derive_ownership(c);
      size_t held = 0;
      for (const auto& block : o.block_tokens) held += block.size();
      CHECK(held == 9);
    }
  }
}

// Token counts small enough to be counted out on paper.
TEST_CASE("ownership: a case counted out by hand", "[verify][ownership]") {
  AttentionCase c =
      AttentionCase::parse("attention/joint/hybrid/ring2.ulysses2/fp32/t3.i6.h3.kv3.headuneven");
  Ownership o = derive_ownership(c);
  using Counts = std::vector<int64_t>;
  CHECK(o.text_rows == Counts{1, 1, 1, 0});
  CHECK(o.image_rows == Counts{2, 2, 1, 1});
  // Rank-major: text 0, image 0 1 of rank 0, then text 1, image 2 3 of rank 1; image follows text.
  CHECK(o.block_tokens == std::vector<Counts>{{0, 3, 4, 1, 5, 6}, {2, 7, 8}});
  CHECK(o.heads == std::vector<Counts>{{0, 1}, {2}});
  CHECK(o.head_slots == Counts{2, 1});

  c.token_split = plan::TokenSplit::kPadded, c.head_split = plan::HeadSplit::kPadded;
  o = derive_ownership(c);
  CHECK(o.text_rows == Counts{1, 1, 1, 1});
  CHECK(o.image_rows == Counts{2, 2, 2, 2});
  CHECK(o.block_tokens == std::vector<Counts>{{0, 3, 4, 1, 5, 6}, {2, 7, 8}});
  CHECK(o.head_slots == Counts{2, 2});
}

TEST_CASE("ownership: a damaged plan differs", "[verify][ownership]") {
  struct Damage {
    const char* name;
    std::function<void(AttentionPlan&)> apply;
  };
  const std::vector<Damage> damages = {
      {"a token to the neighbour",
       [](AttentionPlan& p) { ++p.streams[1].shards[0].end, ++p.streams[1].shards[1].begin; }},
      {"a token twice", [](AttentionPlan& p) { ++p.streams[0].shards[0].end; }},
      {"a token lost", [](AttentionPlan& p) { --p.streams[1].shards.back().end; }},
      {"two ranks swapped",
       [](AttentionPlan& p) { std::swap(p.streams[1].shards[0], p.streams[1].shards[1]); }},
      {"a row too many", [](AttentionPlan& p) { ++p.streams[0].local_rows[1]; }},
      {"a head to the neighbour",
       [](AttentionPlan& p) { ++p.heads[0].q.end, ++p.heads[1].q.begin; }},
      {"heads of two ranks swapped", [](AttentionPlan& p) { std::swap(p.heads[0], p.heads[1]); }},
      {"another KV head", [](AttentionPlan& p) { ++p.heads[0].kv.begin, ++p.heads[0].kv.end; }},
      {"a KV head too few", [](AttentionPlan& p) { --p.heads[1].kv.end; }},
      {"two tokens of a block swapped",
       [](AttentionPlan& p) { std::swap(p.block_tokens[0][0], p.block_tokens[0][1]); }},
      {"stream order in place of rank-major",
       [](AttentionPlan& p) { std::sort(p.block_tokens[0].begin(), p.block_tokens[0].end()); }},
      {"two blocks swapped",
       [](AttentionPlan& p) { std::swap(p.block_tokens[0], p.block_tokens[1]); }},
      {"streams swapped", [](AttentionPlan& p) { std::swap(p.streams[0], p.streams[1]); }},
      {"a stream lost", [](AttentionPlan& p) { p.streams.pop_back(); }},
  };
  const AttentionCase c =
      AttentionCase::parse("attention/joint/hybrid/ring2.ulysses2/fp32/t6.i18.h8.kv4");
  for (const Damage& damage : damages) {
    AttentionPlan plan = c.make_plan();
    REQUIRE(difference(c, plan).empty());
    damage.apply(plan);
    INFO(damage.name);
    CHECK(!difference(c, plan).empty());
  }
}

}  // namespace
}  // namespace shardproof::verify
