// Each fault does what its name says, to whom it says, and no more.
#include <algorithm>

#include "comm/tag.h"
#include "sim/fault_plan.h"
#include "tests/sim/engine/watchdog.h"
#include "tests/sim/tensor_support.h"

namespace shardproof::sim {
namespace {

using at::Tensor;
using comm::CollectiveScope;
using comm::Communicator;
using tests::all_nan;
using tests::expect;
using tests::require_text;
using tests::require_violation;
using tests::same;
using tests::violation_of;
using tests::Watchdog;
using tests::whole_world;

// Results of all ranks and calls: results[rank][call].
using Results = std::vector<std::vector<Tensor>>;
using Program = std::function<std::vector<Tensor>(RankContext&)>;

bool skips_a_wait(const FaultPlan& faults) {
  return std::any_of(faults.begin(), faults.end(),
                     [](const Fault& f) { return f.kind == FaultKind::kSkipWait; });
}

Results run_with(const FaultPlan& faults, int ranks, const Program& program) {
  Watchdog watchdog;
  WorldOptions options;
  options.faults = faults;
  World world(ranks, options);
  Results results(static_cast<size_t>(ranks));
  try {
    world.run(
        [&](RankContext& rank) { results[static_cast<size_t>(rank.rank())] = program(rank); });
  } catch (const CollectiveError& error) {
    // A wait that is skipped is reported in the end: what it spoils is there by then.
    if (error.violation() != ViolationKind::kUnwaited) throw;
    REQUIRE(error.ranks_returned());
    REQUIRE(skips_a_wait(faults));
  }
  return results;
}

// The ranks and calls whose results differ from those without the fault, as "rank.call ".
std::string changed(const FaultPlan& faults, int ranks, const Program& program) {
  const Results right = run_with({}, ranks, program), got = run_with(faults, ranks, program);
  std::string text;
  for (size_t r = 0; r < right.size(); ++r) {
    for (size_t c = 0; c < right[r].size(); ++c) {
      if (!same(right[r][c], got[r][c])) text += fmt::format("{}.{} ", r, c);
    }
  }
  return text;
}

// Three calls of each kind, tags "gather", "swap" and "ring", on 3 ranks with distinct data.
std::vector<Tensor> three_calls(RankContext& rank) {
  const Communicator group = whole_world(rank);
  const int r = rank.rank();
  std::vector<Tensor> results;
  for (int step = 0; step < 3; ++step) {
    const Tensor x = at::arange(3, at::kFloat) + 10 * r + 100 * step + 1.0 / 3;
    {
      const CollectiveScope scope("gather");
      results.push_back(group.all_gather(x, {3, 3, 3}).wait());
    }
    {
      const CollectiveScope scope("swap");
      results.push_back(group.all_to_all(x, {1, 1, 1}, {1, 1, 1}).wait());
    }
    {
      const CollectiveScope scope("ring");
      results.push_back(group.exchange(x, (r + 1) % 3, {3}, (r + 2) % 3).wait());
    }
  }
  return results;
}

}  // namespace

TEST_CASE("a fault without a target changes nothing", "[fault]") {
  CHECK(changed({}, 3, three_calls).empty());
  CHECK(changed({{.kind = FaultKind::kDrop, .tag = "elsewhere"}}, 3, three_calls).empty());
}

TEST_CASE("a fault hits the ranks, tags and occurrences that it names", "[fault]") {
  // Calls 0, 3, 6 are gathers, 1, 4, 7 swaps, 2, 5, 8 rings.
  const auto drop = [](Fault f) {
    f.kind = FaultKind::kDrop;
    return changed({f}, 3, three_calls);
  };
  CHECK(drop({.tag = "swap", .rank = 1}) == "1.1 1.4 1.7 ");
  CHECK(drop({.tag = "swap", .occurrence = 2}) == "0.7 1.7 2.7 ");
  CHECK(drop({.tag = "s*", .rank = 2, .occurrence = 0}) == "2.1 ");
  CHECK(drop({.tag = "[gs]*", .rank = 0}) == "0.0 0.1 0.3 0.4 0.6 0.7 ");
  CHECK(drop({.rank = 0}) == "0.0 0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8 ");
  // An exchange is two calls of its tag: the send, which receives nothing, and the receive.
  CHECK(drop({.tag = "ring", .rank = 0, .occurrence = 2}).empty());
  CHECK(drop({.tag = "ring", .rank = 0, .occurrence = 3}) == "0.5 ");
}

TEST_CASE("the first fault of the plan that applies is taken", "[fault]") {
  const FaultPlan plan = {{.kind = FaultKind::kDrop, .tag = "a*", .occurrence = 1},
                          {.kind = FaultKind::kScale, .tag = "*", .rank = 2},
                          {.kind = FaultKind::kRound, .tag = "ab"}};
  const auto kinds = [&](int rank, const std::vector<std::string>& tags) {
    FaultMatcher matcher(plan, rank);
    std::vector<int> found;
    for (const std::string& tag : tags) {
      const Fault* fault = matcher.match(tag);
      found.push_back(fault ? static_cast<int>(fault->kind) : -1);
    }
    return found;
  };
  const int drop = static_cast<int>(FaultKind::kDrop), scale = static_cast<int>(FaultKind::kScale),
            round = static_cast<int>(FaultKind::kRound);
  CHECK(kinds(0, {"b", "ab", "a", "ab"}) == std::vector<int>{-1, round, drop, round});
  CHECK(kinds(2, {"b", "ab", "a", "ab"}) == std::vector<int>{scale, scale, drop, scale});
  CHECK(kinds(0, {"ab", "ab", "ab"}) == std::vector<int>{round, drop, round});
  CHECK(FaultMatcher().match("a") == nullptr);

  // A call that another fault takes counts as an occurrence all the same.
  FaultMatcher two({{.kind = FaultKind::kDrop, .occurrence = 0}, {.occurrence = 1, .factor = 2}},
                   0);
  CHECK(two.match("a")->kind == FaultKind::kDrop);
  REQUIRE(two.match("a") != nullptr);
  CHECK(two.match("a") == nullptr);
}

TEST_CASE("scale, drop and round change what arrives", "[fault]") {
  const Results right = run_with({}, 3, three_calls);
  const auto on_rank_1 = [](Fault f) {
    f.rank = 1;
    return run_with({f}, 3, three_calls)[1];
  };
  const auto scaled = on_rank_1({.kind = FaultKind::kScale, .factor = 0.5});
  const auto dropped = on_rank_1({.kind = FaultKind::kDrop});
  const auto rounded = on_rank_1({.kind = FaultKind::kRound, .dtype = at::kBFloat16});
  for (size_t c = 0; c < 9; ++c) {
    CHECK(same(scaled[c], right[1][c] * 0.5));
    CHECK(same(dropped[c], at::zeros_like(right[1][c])));
    CHECK(same(rounded[c], right[1][c].to(at::kBFloat16).to(at::kFloat)));
    CHECK(!same(rounded[c], right[1][c]));
  }
}

TEST_CASE("faults change in-place results too", "[fault]") {
  const Program in_place = [](RankContext& rank) -> std::vector<Tensor> {
    const Communicator group = whole_world(rank);
    const Tensor x = at::full({2}, rank.rank() + 1.0), y = at::full({2}, rank.rank() + 1.0);
    return {group.all_reduce(x).wait(), group.broadcast(y, 0).wait()};
  };
  const Results got = run_with({{.kind = FaultKind::kScale, .rank = 1, .factor = 2}}, 2, in_place);
  CHECK(same(got[0][0], at::full({2}, 3.0)));
  CHECK(same(got[1][0], at::full({2}, 6.0)));
  CHECK(same(got[1][1], at::full({2}, 2.0)));
}

TEST_CASE("rotated peers deliver each other's data", "[fault]") {
  const Results right = run_with({}, 3, three_calls);
  for (const int shift : {1, 2, -1, 4}) {
    const Fault fault{.kind = FaultKind::kRotatePeers, .tag = "[gs]*", .rank = 1, .shift = shift};
    const Results got = run_with({fault}, 3, three_calls);
    const auto from = [&](int64_t i) { return ((i + shift) % 3 + 3) % 3; };
    for (int64_t i = 0; i < 3; ++i) {
      CHECK(same(got[1][0].narrow(0, 3 * i, 3), right[1][0].narrow(0, 3 * from(i), 3)));
      CHECK(same(got[1][1].narrow(0, i, 1), right[1][1].narrow(0, from(i), 1)));
    }
    CHECK(same(got[0][0], right[0][0]));
  }
  CHECK(changed({{.kind = FaultKind::kRotatePeers, .shift = 3}}, 3, three_calls).empty());
}

TEST_CASE("a stale result is that of the call before", "[fault]") {
  const Results right = run_with({}, 3, three_calls);
  const Fault second{.kind = FaultKind::kStale, .tag = "swap", .rank = 1, .occurrence = 1};
  CHECK(changed({second}, 3, three_calls) == "1.4 ");
  CHECK(same(run_with({second}, 3, three_calls)[1][4], right[1][1]));
  // What the program does with the earlier result meanwhile does not matter.
  const Program writes = [](RankContext& rank) -> std::vector<Tensor> {
    const CollectiveScope scope("swap");
    std::vector<Tensor> results;
    for (int step = 1; step <= 2; ++step) {
      const Tensor got = whole_world(rank).all_gather(at::full({1}, 1.0 * step), {1, 1}).wait();
      results.push_back(got.clone());
      got.zero_();
    }
    return results;
  };
  CHECK(same(run_with({second}, 2, writes)[1][1], at::ones({2})));
  // There is none before the first.
  const Fault first{.kind = FaultKind::kStale, .tag = "swap", .occurrence = 0};
  CHECK(changed({first}, 3, three_calls).empty());
}

TEST_CASE("an echo yields what the rank itself sent last", "[fault]") {
  const Fault fault{.kind = FaultKind::kEcho, .tag = "ring", .rank = 1};
  CHECK(changed({fault}, 3, three_calls) == "1.2 1.5 1.8 ");
  const Results right = run_with({}, 3, three_calls), got = run_with({fault}, 3, three_calls);
  for (const size_t call : {2u, 5u, 8u}) CHECK(same(got[1][call], right[2][call]));  // 2 is next
}

TEST_CASE("an all-reduce that stays local yields what the rank put in", "[fault]") {
  const Program sums = [](RankContext& rank) -> std::vector<Tensor> {
    const Communicator group = whole_world(rank);
    return {group.all_reduce(at::full({2}, rank.rank() + 1.0)).wait()};
  };
  const Results got = run_with({{.kind = FaultKind::kLocal, .rank = 1}}, 3, sums);
  CHECK(same(got[0][0], at::full({2}, 6.0)));
  CHECK(same(got[1][0], at::full({2}, 2.0)));
}

TEST_CASE("a call that is left out shows as a mismatch or a deadlock", "[fault]") {
  const Program two_calls = [](RankContext& rank) -> std::vector<Tensor> {
    const Communicator group = whole_world(rank);
    const Tensor x = at::full({1}, rank.rank() + 1.0);
    std::vector<Tensor> results;
    for (const char* tag : {"a", "b"}) {
      const CollectiveScope scope(tag);
      results.push_back(group.all_gather(x, {1, 1}).wait());
    }
    return results;
  };
  const auto omit = [&](const char* tag, int rank) {
    return FaultPlan{{.kind = FaultKind::kOmit, .tag = tag, .rank = rank}};
  };
  require_violation(violation_of([&] { run_with(omit("a", 0), 2, two_calls); }),
                    ViolationKind::kMismatch);
  require_violation(violation_of([&] { run_with(omit("b", 0), 2, two_calls); }),
                    ViolationKind::kDeadlock);
  // Left out on all ranks, nothing was written.
  for (const auto& results : run_with(omit("b", -1), 2, two_calls)) CHECK(all_nan(results[1]));
}

TEST_CASE("a buffer that is used again too early is a race", "[fault]") {
  const FaultPlan plan = {{.kind = FaultKind::kReuse, .tag = "swap", .rank = 1}};
  const CollectiveError error = violation_of([&] { run_with(plan, 3, three_calls); });
  require_violation(error, ViolationKind::kRace);
  require_text(error, {"swap"});
}

TEST_CASE("a skipped wait leaves poison here and nothing wrong elsewhere", "[fault]") {
  const Fault fault{.kind = FaultKind::kSkipWait, .tag = "swap", .rank = 1};
  CHECK(changed({fault}, 3, three_calls) == "1.1 1.4 1.7 ");
  for (const size_t call : {1u, 4u, 7u}) {
    CHECK(all_nan(run_with({fault}, 3, three_calls)[1][call]));
  }
  // A receive's wait can be skipped as well.
  const Fault ring{.kind = FaultKind::kSkipWait, .tag = "ring", .rank = 2};
  CHECK(changed({ring}, 3, three_calls) == "2.2 2.5 2.8 ");
}

TEST_CASE("who skipped a wait may overwrite what others have yet to read", "[fault]") {
  for (const uint64_t seed : {0, 1, 2, 3}) {
    Watchdog watchdog;
    WorldOptions options;
    options.schedule_seed = seed;
    options.faults = {{.kind = FaultKind::kSkipWait, .tag = "x", .rank = 0}};
    World world(3, options);
    const auto program = [](RankContext& rank) {
      const Communicator group = whole_world(rank), late = whole_world(rank, "late");
      Tensor x = at::full({3}, rank.rank() + 1.0);
      comm::Pending pending = [&] {
        const CollectiveScope scope("x");
        return group.all_to_all(x, {1, 1, 1}, {1, 1, 1});
      }();
      if (rank.rank() != 0) late.barrier();  // the others read when rank 0 has gone on
      const Tensor got = pending.wait();
      x.fill_(-1);
      x = Tensor();
      if (rank.rank() == 0) late.barrier();
      expect(rank.rank() == 0 ? all_nan(got) : same(got, at::arange(1, 4, at::kFloat)),
             "poison on rank 0, the right rows elsewhere");
    };
    const CollectiveError error = violation_of([&] { world.run(program); });
    require_violation(error, ViolationKind::kUnwaited);
    require_text(error, {"rank 0 returned without waiting for its all_to_all in group 'world', "
                         "call 0, tag 'x'"});
  }
}

TEST_CASE("a call that is held back comes after the next one of its group", "[fault]") {
  const Program two_calls = [](RankContext& rank) -> std::vector<Tensor> {
    const Communicator group = whole_world(rank);
    const auto start = [&](const char* tag) {
      const CollectiveScope scope(tag);
      return group.all_gather(at::full({1}, rank.rank() + 1.0), {1, 1});
    };
    comm::Pending a = start("a"), b = start("b");
    return {a.wait(), b.wait()};
  };
  const Fault hold_a{.kind = FaultKind::kHoldBack, .tag = "a", .rank = 0};
  const CollectiveError error = violation_of([&] { run_with({hold_a}, 2, two_calls); });
  require_violation(error, ViolationKind::kMismatch);
  require_text(error, {"tags differ", "'a'", "'b'", "call 0"});

  // On all ranks alike, or with nothing behind it, no harm is done.
  CHECK(changed({{.kind = FaultKind::kHoldBack, .tag = "a"}}, 2, two_calls).empty());
  CHECK(changed({{.kind = FaultKind::kHoldBack, .tag = "b", .rank = 0}}, 2, two_calls).empty());
}

TEST_CASE("a call that is held back comes right after the next one", "[fault]") {
  Watchdog watchdog;
  WorldOptions options;
  options.faults = {{.kind = FaultKind::kHoldBack, .tag = "a"}};
  World world(2, options);
  world.run([](RankContext& rank) {
    const Communicator group = whole_world(rank);
    std::vector<comm::Pending> pending;
    for (const char* tag : {"a", "b", "c"}) {
      const CollectiveScope scope(tag);
      pending.push_back(group.all_reduce(at::ones({2})));
    }
    for (comm::Pending& p : pending) p.wait();
  });
  std::string tags;
  for (const CollectiveCall& call : world.calls(0)) tags += call.tag;
  CHECK(tags == "bac");
}

TEST_CASE("calls that are all held back are issued all the same", "[fault]") {
  CHECK(changed({{.kind = FaultKind::kHoldBack}}, 3, three_calls).empty());
  CHECK(changed({{.kind = FaultKind::kHoldBack, .rank = 1}}, 3, three_calls).empty());
  const Program many_at_once = [](RankContext& rank) -> std::vector<Tensor> {
    const Communicator group = whole_world(rank);
    std::vector<comm::Pending> pending;
    for (int i = 0; i < 4; ++i) {
      pending.push_back(group.all_gather(at::full({1}, 10.0 * rank.rank() + i), {1, 1}));
    }
    std::vector<Tensor> results;
    for (comm::Pending& p : pending) results.push_back(p.wait());
    return results;
  };
  CHECK(changed({{.kind = FaultKind::kHoldBack}}, 2, many_at_once).empty());
}

TEST_CASE("a call that is held back past another group's contradicts the others' order",
          "[fault]") {
  const Program two_groups = [](RankContext& rank) -> std::vector<Tensor> {
    const Communicator dp = whole_world(rank, "dp"), sp = whole_world(rank, "sp");
    comm::Pending a = [&] {
      const CollectiveScope scope("grads");
      return dp.all_reduce(at::ones({2}));
    }();
    comm::Pending b = [&] {
      const CollectiveScope scope("tokens");
      return sp.all_reduce(at::ones({2}));
    }();
    return {a.wait(), b.wait()};
  };
  const Fault fault{.kind = FaultKind::kHoldBack, .tag = "grads", .rank = 1};
  const CollectiveError error = violation_of([&] { run_with({fault}, 2, two_groups); });
  require_violation(error, ViolationKind::kOrder);
  require_text(error, {"rank 0 issues all_reduce of group 'dp'",
                       "rank 1 issues all_reduce of group "
                       "'sp'"});
}

TEST_CASE("a delayed call lets all others go first and changes no result", "[fault]") {
  CHECK(changed({{.kind = FaultKind::kDelay}}, 3, three_calls).empty());
  CHECK(changed({{.kind = FaultKind::kDelay, .rank = 1}}, 3, three_calls).empty());
  const auto order_of_posts = [](const FaultPlan& faults) {
    Watchdog watchdog;
    WorldOptions options;
    options.cores = 1;
    options.faults = faults;
    World world(4, options);
    std::vector<int> posts;  // one rank runs at a time
    world.run([&](RankContext& rank) {
      comm::Pending pending = whole_world(rank).all_reduce(at::ones({2}));
      posts.push_back(rank.rank());
      pending.wait();
    });
    return posts;
  };
  CHECK(order_of_posts({}) == std::vector<int>{0, 1, 2, 3});
  for (const int late : {0, 1, 2, 3}) {
    CHECK(order_of_posts({{.kind = FaultKind::kDelay, .rank = late}}).back() == late);
  }
}

TEST_CASE("a rank that is killed is named, and the others do not hang", "[fault]") {
  const Fault fault{.kind = FaultKind::kKill, .tag = "swap", .rank = 2, .occurrence = 1};
  const CollectiveError error = violation_of([&] { run_with({fault}, 3, three_calls); });
  require_violation(error, ViolationKind::kRankFailed);
  CHECK(error.kind() == ErrorKind::kViolation);
  require_text(error, {"rank 2 failed: rank 2 was killed by the fault plan at tag 'swap'"});
}

TEST_CASE("a rank can be killed inside an exchange", "[fault]") {
  for (const int64_t occurrence : {0, 1}) {  // at its send, at its receive
    Watchdog watchdog;
    WorldOptions options;
    options.faults = {
        {.kind = FaultKind::kKill, .tag = "ring", .rank = 1, .occurrence = occurrence}};
    World world(3, options);
    const CollectiveError error =
        violation_of([&] { world.run([](RankContext& rank) { three_calls(rank); }); });
    require_violation(error, ViolationKind::kRankFailed);
    world.set_faults({});
    world.run([](RankContext& rank) { three_calls(rank); });
  }
}

TEST_CASE("faults are for the runs that follow, until others are set", "[fault]") {
  Watchdog watchdog;
  World world(3);
  const auto sum_of_rank_0 = [&] {
    double sum = 0;
    world.run([&](RankContext& rank) {
      const auto results = three_calls(rank);
      if (rank.rank() == 0) sum = results[1].sum().item<double>();
    });
    return sum;
  };
  const double right = sum_of_rank_0();
  world.set_faults({{.kind = FaultKind::kDrop, .tag = "swap", .rank = 0, .occurrence = 0}});
  CHECK(sum_of_rank_0() == 0);
  CHECK(sum_of_rank_0() == 0);  // occurrences are counted per run
  world.set_faults({});
  CHECK(sum_of_rank_0() == right);
}

}  // namespace shardproof::sim
