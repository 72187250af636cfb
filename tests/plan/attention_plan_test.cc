#include "plan/attention_plan.h"

#include <algorithm>
#include <functional>
#include <random>

#include "tests/file_support.h"

namespace shardproof::plan {

static std::ostream& operator<<(std::ostream& out, const Interval& interval) {
  return out << '[' << interval.begin << ',' << interval.end << ')';
}

namespace {

using tests::contains;
using tests::error_text;
using Options = AttentionPlanOptions;

// Options that can be planned: meshes up to 8 SP ranks, one to three streams (empty ones too), all
// splits, grouped heads.
Options random_options(std::mt19937& random) {
  const auto pick = [&](int from, int to) {
    return from + static_cast<int>(random() % static_cast<unsigned>(to - from + 1));
  };
  Options o;
  o.mesh = {pick(1, 2), pick(1, 3), pick(1, 4)};
  o.kv_heads = pick(1, 4);
  o.q_heads = o.kv_heads * pick(1, 4);
  o.head_split = static_cast<HeadSplit>(pick(0, 2));
  if (o.head_split == HeadSplit::kEven && o.q_heads % o.mesh.ulysses != 0) {
    o.head_split = HeadSplit::kPadded;
  }
  if (o.head_split == HeadSplit::kUneven && o.q_heads < o.mesh.ulysses) {
    o.head_split = HeadSplit::kPadded;
  }
  o.token_split = static_cast<TokenSplit>(pick(0, 1));
  o.ring_mode = static_cast<RingMode>(pick(0, 1));
  o.convention = static_cast<GradientConvention>(pick(0, 2));
  for (int s = pick(1, 3); s > 0; --s) {
    const auto placement = static_cast<StreamPlacement>(pick(0, 1));
    o.streams.push_back(
        {fmt::format("s{}", s), pick(0, 3) == 0 ? pick(0, 2) : pick(0, 40), placement});
  }
  return o;
}

void on_random_plans(int count, const std::function<void(const Options&, AttentionPlan)>& check) {
  std::mt19937 random(20240608);
  for (int i = 0; i < count; ++i) {
    const Options options = random_options(random);
    const AttentionPlan plan = make_attention_plan(options);
    INFO("plan " << i << "\n" << to_table(plan));
    check(options, plan);
  }
}

// Two streams over a mesh that mixes all there is: uneven tokens, grouped heads, ring and Ulysses.
AttentionPlan mixed_plan() {
  Options o;
  o.mesh = {1, 2, 2};
  o.q_heads = 8;
  o.kv_heads = 4;
  o.streams = {{"text", 7, StreamPlacement::kSharded}, {"image", 10, StreamPlacement::kSharded}};
  return make_attention_plan(o);
}

// `problem` is a part of what audit() must say about the damaged plan.
void require_audit(const std::function<void(AttentionPlan&)>& damage, const std::string& problem) {
  AttentionPlan plan = mixed_plan();
  REQUIRE(audit(plan).empty());
  damage(plan);
  const std::vector<std::string> problems = audit(plan);
  std::string text;
  for (const std::string& line : problems) text += line + "\n";
  INFO(text);
  REQUIRE(!problems.empty());
  REQUIRE(contains(text, problem));
}

}  // namespace

TEST_CASE("every plan that is made passes its audit", "[plan]") {
  on_random_plans(2000, [](const Options&, const AttentionPlan& plan) {
    const auto problems = audit(plan);
    INFO((problems.empty() ? std::string() : problems[0]));
    REQUIRE(problems.empty());
  });
}

TEST_CASE("tokens are cut in order, without gap, as evenly as asked for", "[plan]") {
  on_random_plans(500, [](const Options& o, const AttentionPlan& plan) {
    const int sp = o.mesh.ring * o.mesh.ulysses;
    REQUIRE(plan.sp() == sp);
    for (size_t s = 0; s < plan.streams.size(); ++s) {
      const StreamPlan& stream = plan.streams[s];
      const int64_t tokens = o.streams[s].tokens, largest = (tokens + sp - 1) / sp;
      REQUIRE(stream.name == o.streams[s].name);
      REQUIRE(stream.tokens == tokens);
      REQUIRE(static_cast<int>(stream.shards.size()) == sp);
      REQUIRE(static_cast<int>(stream.local_rows.size()) == sp);
      const bool replicated = stream.placement == StreamPlacement::kReplicated;
      const bool padded = o.token_split == TokenSplit::kPadded && !replicated;
      int64_t next = 0;
      for (int r = 0; r < sp; ++r) {
        const Interval shard = stream.shards[static_cast<size_t>(r)];
        REQUIRE(shard.begin == next);
        next = shard.end;
        const int64_t left = tokens - shard.begin;
        const int64_t even = tokens / sp + (r < tokens % sp ? 1 : 0);
        REQUIRE(shard.size() == (padded ? std::min(largest, left) : even));
        const int64_t local = replicated ? tokens : padded ? largest : shard.size();
        REQUIRE(stream.local_rows[static_cast<size_t>(r)] == local);
      }
      REQUIRE(next == tokens);
    }
  });
}

TEST_CASE("heads are cut in order and read their own KV head", "[plan]") {
  on_random_plans(500, [](const Options& o, const AttentionPlan& plan) {
    const int64_t u = o.mesh.ulysses, group = o.q_heads / o.kv_heads;
    REQUIRE(static_cast<int64_t>(plan.heads.size()) == u);
    int64_t next = 0;
    for (int64_t r = 0; r < u; ++r) {
      const HeadShard& shard = plan.heads[static_cast<size_t>(r)];
      REQUIRE(shard.q.begin == next);
      next = shard.q.end;
      const int64_t even = o.q_heads / u + (r < o.q_heads % u ? 1 : 0);
      const int64_t padded = (o.q_heads + u - 1) / u;
      REQUIRE(shard.q.size() == (o.head_split == HeadSplit::kPadded ? padded : even));
      // Only KV heads that exist travel, and only those that are read.
      REQUIRE(shard.kv.begin >= 0);
      REQUIRE(shard.kv.end <= o.kv_heads);
      std::vector<int> readers(static_cast<size_t>(shard.kv.size()), 0);
      for (int64_t i = 0; i < shard.q.size(); ++i) {
        const int64_t local = shard.kv_of_q.empty() ? i / (shard.q.size() / shard.kv.size())
                                                    : shard.kv_of_q[static_cast<size_t>(i)];
        ++readers.at(static_cast<size_t>(local));
        const int64_t head = shard.q.begin + i;
        if (head < o.q_heads) REQUIRE(shard.kv.begin + local == head / group);
      }
      REQUIRE(std::count(readers.begin(), readers.end(), 0) == 0);
    }
    REQUIRE(next >= o.q_heads);
    REQUIRE((o.head_split == HeadSplit::kPadded || next == o.q_heads));
  });
}

TEST_CASE("a ring rank's block is rank-major", "[plan]") {
  on_random_plans(500, [](const Options& o, const AttentionPlan& plan) {
    REQUIRE(static_cast<int>(plan.block_tokens.size()) == o.mesh.ring);
    std::vector<int64_t> all;
    for (int ring = 0; ring < o.mesh.ring; ++ring) {
      std::vector<int64_t> want;
      for (int u = 0; u < o.mesh.ulysses; ++u) {
        int64_t offset = 0;
        for (const StreamPlan& stream : plan.streams) {
          const Interval shard = stream.shards[static_cast<size_t>(ring * o.mesh.ulysses + u)];
          for (int64_t t = shard.begin; t < shard.end; ++t) want.push_back(offset + t);
          offset += stream.tokens;
        }
      }
      REQUIRE(plan.block_tokens[static_cast<size_t>(ring)] == want);
      REQUIRE(plan.block_rows(ring) == static_cast<int64_t>(want.size()));
      all.insert(all.end(), want.begin(), want.end());
    }
    // Together the blocks hold every joint token once.
    std::sort(all.begin(), all.end());
    REQUIRE(static_cast<int64_t>(all.size()) == plan.joint_tokens());
    for (size_t i = 0; i < all.size(); ++i) REQUIRE(all[i] == static_cast<int64_t>(i));
  });
}

TEST_CASE("sums over streams", "[plan]") {
  const AttentionPlan plan = mixed_plan();  // text [2,2,2,1], image [3,3,2,2]
  CHECK(plan.joint_tokens() == 17);
  CHECK(plan.stream_offset(0) == 0);
  CHECK(plan.stream_offset(1) == 7);
  CHECK(plan.shard_rows(0) == 5);
  CHECK(plan.shard_rows(3) == 3);
  CHECK(plan.block_rows(0) == 10);
  CHECK(plan.block_rows(1) == 7);
}

TEST_CASE("pads belong to sharded streams only", "[plan]") {
  Options o;
  o.mesh = {1, 1, 4};
  o.q_heads = o.kv_heads = 4;
  o.token_split = TokenSplit::kPadded;
  o.streams = {{"text", 5, StreamPlacement::kReplicated}, {"image", 5, StreamPlacement::kSharded}};
  const AttentionPlan plan = make_attention_plan(o);
  CHECK(plan.streams[0].local_rows == std::vector<int64_t>{5, 5, 5, 5});
  CHECK(plan.streams[0].shards == std::vector<Interval>{{0, 2}, {2, 3}, {3, 4}, {4, 5}});
  CHECK(plan.streams[1].local_rows == std::vector<int64_t>{2, 2, 2, 2});
  CHECK(plan.streams[1].shards == std::vector<Interval>{{0, 2}, {2, 4}, {4, 5}, {5, 5}});
}

TEST_CASE("query heads that do not fill their KV heads evenly are listed", "[plan]") {
  Options o;
  o.mesh = {1, 1, 2};
  o.q_heads = 6;
  o.kv_heads = 2;
  o.streams = {{"x", 4, StreamPlacement::kSharded}};
  o.mesh.ulysses = 4;
  o.head_split = HeadSplit::kUneven;  // [2,2,1,1] over KV heads 0,0,0,1,1,1
  const AttentionPlan plan = make_attention_plan(o);
  CHECK(plan.heads[0].kv == Interval{0, 1});
  CHECK(plan.heads[1].kv == Interval{0, 2});
  CHECK(plan.heads[2].kv == Interval{1, 2});
  CHECK(plan.heads[1].kv_of_q.empty());  // head 2 reads 0, head 3 reads 1: evenly grouped
  o.mesh.ulysses = 1;
  o.q_heads = 6;
  CHECK(make_attention_plan(o).heads[0].kv_of_q.empty());
  o.mesh.ulysses = 2;
  o.q_heads = 9;
  o.kv_heads = 3;  // [5,4]: heads 0..4 read 0,0,0,1,1
  CHECK(make_attention_plan(o).heads[0].kv_of_q == std::vector<int64_t>{0, 0, 0, 1, 1});
  CHECK(make_attention_plan(o).heads[1].kv_of_q == std::vector<int64_t>{0, 1, 1, 1});
}

TEST_CASE("the audit finds tokens that are lost or held twice", "[plan][audit]") {
  require_audit([](AttentionPlan& p) { --p.streams[1].shards[3].end; },
                "stream 'image': token 9 has 0 owners");
  require_audit([](AttentionPlan& p) { ++p.streams[0].shards[1].begin; },
                "stream 'text': token 2 has 0 owners");
  require_audit(
      [](AttentionPlan& p) {
        --p.streams[0].shards[2].begin;
        ++p.streams[0].local_rows[2];
      },
      "stream 'text': token 3 has 2 owners");
  require_audit([](AttentionPlan& p) { p.streams[0].shards[1] = p.streams[0].shards[0]; },
                "stream 'text': token 0 has 2 owners");
}

TEST_CASE("the audit finds rows that cannot be", "[plan][audit]") {
  require_audit([](AttentionPlan& p) { p.streams[1].shards[3].end = 11; },
                "stream 'image': SP rank 3 owns [8,11) of 10 tokens in 2 rows");
  require_audit([](AttentionPlan& p) { p.streams[1].shards[0].begin = -1; }, "SP rank 0 owns [-1,");
  require_audit(
      [](AttentionPlan& p) { std::swap(p.streams[1].shards[0].begin, p.streams[1].shards[0].end); },
      "SP rank 0 owns [3,0)");
  require_audit([](AttentionPlan& p) { --p.streams[0].local_rows[0]; }, "in 1 rows");
}

TEST_CASE("the audit finds heads in the wrong place", "[plan][audit]") {
  SECTION("query heads rotated against their KV heads") {
    require_audit([](AttentionPlan& p) { std::swap(p.heads[0].q, p.heads[1].q); },
                  "Ulysses rank 0: query head 4 reads KV head 0; expected 2");
  }
  SECTION("the wrong KV head") {
    require_audit(
        [](AttentionPlan& p) {
          p.heads[1].kv = {1, 3};
        },
        "Ulysses rank 1: query head 4 reads KV head 1; expected 2");
    require_audit(
        [](AttentionPlan& p) {
          p.heads[0].kv_of_q = {0, 1, 0, 1};
        },
        "query head 1 reads KV head 1; expected 0");
  }
  SECTION("a KV head that does not travel") {
    require_audit(
        [](AttentionPlan& p) {
          p.heads[0].kv = {0, 1};
          p.heads[0].kv_of_q = {0, 0, 1, 1};
        },
        "Ulysses rank 0");
  }
  SECTION("lost and twice") {
    require_audit([](AttentionPlan& p) { p.heads[1].q.end = 7; }, "query head 7 has 0 owners");
    require_audit([](AttentionPlan& p) { p.heads[1] = p.heads[0]; }, "query head 0 has 2 owners");
  }
}

TEST_CASE("the audit finds masks that are read in another order", "[plan][audit]") {
  SECTION("stream order") {
    require_audit(
        [](AttentionPlan& p) { std::sort(p.block_tokens[0].begin(), p.block_tokens[0].end()); },
        "ring rank 0: key masks are read in another order");
  }
  SECTION("one column off, in the last block") {
    require_audit([](AttentionPlan& p) { std::swap(p.block_tokens[1][0], p.block_tokens[1][1]); },
                  "ring rank 1");
  }
  SECTION("blocks exchanged") {
    require_audit([](AttentionPlan& p) { std::swap(p.block_tokens[0], p.block_tokens[1]); },
                  "ring rank 0");
  }
}

TEST_CASE("the audit bears plans that lack something", "[plan][audit]") {
  // What it says is of less interest than that it says it and does not die.
  require_audit([](AttentionPlan& p) { p.heads[0].kv = {0, 0}; }, "Ulysses rank 0");
  require_audit([](AttentionPlan& p) { p.heads[0].kv_of_q = {0}; }, "Ulysses rank 0");
  require_audit([](AttentionPlan& p) { p.heads[0].kv_of_q = {0, 0, 1, -1}; }, "Ulysses rank 0");
  require_audit([](AttentionPlan& p) { p.heads[0].kv = {0, 3}; }, "Ulysses rank 0");
  require_audit([](AttentionPlan& p) { p.heads[0].q.begin = -1; }, "Ulysses rank 0");
  require_audit([](AttentionPlan& p) { p.heads.pop_back(); }, "Ulysses");
  require_audit([](AttentionPlan& p) { p.streams[0].shards.pop_back(); }, "text");
  require_audit([](AttentionPlan& p) { p.streams[0].local_rows.pop_back(); }, "text");
  require_audit([](AttentionPlan& p) { p.block_tokens.pop_back(); }, "ring");
}

TEST_CASE("random damage never passes the audit", "[plan][audit]") {
  std::mt19937 random(7);
  int tried = 0;
  on_random_plans(600, [&](const Options&, AttentionPlan plan) {
    auto& stream = plan.streams[random() % plan.streams.size()];
    auto& shard = stream.shards[random() % stream.shards.size()];
    auto& block = plan.block_tokens[random() % plan.block_tokens.size()];
    HeadShard& heads = plan.heads[random() % plan.heads.size()];
    switch (random() % 4) {
      case 0:
        if (shard.size() == 0) return;
        (random() % 2 == 0 ? shard.begin += 1 : shard.end -= 1);
        break;
      case 1:
        if (block.size() < 2) return;
        std::rotate(block.begin(), block.begin() + 1, block.end());
        break;
      case 2:
        if (heads.q.begin >= plan.q_heads) return;  // nothing but padding
        heads.kv = {heads.kv.begin + 1, heads.kv.end + 1};
        break;
      default:
        if (heads.q.begin >= plan.q_heads) return;
        heads.q = {heads.q.begin + 1, heads.q.end + 1};
        break;
    }
    ++tried;
    REQUIRE(!audit(plan).empty());
  });
  CHECK(tried > 400);
}

TEST_CASE("options that cannot be planned are refused with what is wrong", "[plan]") {
  Options good;
  good.mesh = {1, 1, 4};
  good.q_heads = 8;
  good.kv_heads = 4;
  good.streams = {{"text", 3, StreamPlacement::kSharded}};
  REQUIRE(audit(make_attention_plan(good)).empty());
  const auto text_of = [&](const std::function<void(Options&)>& spoil) {
    Options o = good;
    spoil(o);
    const std::string text = error_text([&] { make_attention_plan(o); });
    UNSCOPED_INFO(text);
    return text;
  };
  CHECK(contains(text_of([](Options& o) { o.mesh.ring = 0; }), "dp1.ring0.ulysses4"));
  CHECK(contains(text_of([](Options& o) { o.q_heads = 0; }), "0 query heads over 4 KV heads"));
  CHECK(contains(text_of([](Options& o) { o.kv_heads = 0; }), "8 query heads over 0 KV heads"));
  CHECK(contains(text_of([](Options& o) { o.kv_heads = 3; }), "8 query heads over 3 KV heads"));
  CHECK(contains(text_of([](Options& o) { o.streams.clear(); }), "at least one stream"));
  CHECK(contains(text_of([](Options& o) { o.streams[0].tokens = -1; }),
                 "stream 'text' has -1 tokens"));
  CHECK(contains(text_of([](Options& o) { o.mesh.ulysses = 3; }),
                 "8 heads cannot be split evenly over ulysses=3"));
  CHECK(contains(text_of([](Options& o) {
                   o.mesh.ulysses = 16;
                   o.head_split = HeadSplit::kUneven;
                 }),
                 "8 heads over ulysses=16 leaves ranks without a head"));
}

TEST_CASE("a plan as a table", "[plan]") {
  Options o;
  o.mesh = {1, 2, 2};
  o.q_heads = 6;
  o.kv_heads = 3;
  o.streams = {{"text", 5, StreamPlacement::kReplicated}, {"image", 9, StreamPlacement::kSharded}};
  o.token_split = TokenSplit::kPadded;
  o.ring_mode = RingMode::kAllGather;
  o.convention = GradientConvention::kSliceTimesSp;
  const std::string table = R"(
attention plan dp1.ring2.ulysses2, 6 query heads, 3 KV heads, allgather, B
SP rank  ring  ulysses  query heads   KV heads    text rows (pads)   image rows (pads)
      0     0        0        [0,3)      [0,2)           [0,2) (0)           [0,3) (0)
      1     0        1        [3,6)      [1,3)           [2,3) (0)           [3,6) (0)
      2     1        0        [0,3)      [0,2)           [3,4) (0)           [6,9) (0)
      3     1        1        [3,6)      [1,3)           [4,5) (0)           [9,9) (3)
)";
  CHECK(to_table(make_attention_plan(o)) == table.substr(1));  // begins on a line of its own
}

TEST_CASE("every choice has a name", "[plan]") {
  CHECK(std::string(to_string(TokenSplit::kUneven)) == "uneven");
  CHECK(std::string(to_string(TokenSplit::kPadded)) == "padded");
  CHECK(std::string(to_string(HeadSplit::kEven)) == "even");
  CHECK(std::string(to_string(HeadSplit::kUneven)) == "uneven");
  CHECK(std::string(to_string(HeadSplit::kPadded)) == "padded");
  CHECK(std::string(to_string(RingMode::kRotate)) == "rotate");
  CHECK(std::string(to_string(RingMode::kAllGather)) == "allgather");
  CHECK(std::string(to_string(GradientConvention::kSliceThenScaleLoss)) == "A");
  CHECK(std::string(to_string(GradientConvention::kSliceTimesSp)) == "B");
  CHECK(std::string(to_string(GradientConvention::kSumThenSlice)) == "C");
}

}  // namespace shardproof::plan
