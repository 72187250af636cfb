// The recorder and the simulator must tell the same story of the same run.
#include "comm/recording_backend.h"

#include "comm/tag.h"
#include "tests/sim/engine/watchdog.h"
#include "tests/sim/tensor_support.h"

namespace shardproof::comm {
namespace {

using at::Tensor;
using tests::expect_same;
using tests::Watchdog;
using tests::world_ranks;

using Logs = std::vector<std::shared_ptr<CallLog>>;

Logs empty_logs(int ranks) {
  Logs logs;
  for (int r = 0; r < ranks; ++r) logs.push_back(std::make_shared<CallLog>());
  return logs;
}

Communicator recorded(sim::RankContext& rank, const std::string& name, const Logs& logs) {
  const std::vector<int> ranks = world_ranks(rank.world_size());
  auto backend = c10::make_intrusive<RecordingBackend>(rank.create(name, ranks), name,
                                                       logs[static_cast<size_t>(rank.rank())]);
  return Communicator(std::move(backend), name, ranks);
}

// Every kind of call, over two groups, with tags.
void program(sim::RankContext& rank, const Logs& logs) {
  const Communicator a = recorded(rank, "a", logs), b = recorded(rank, "b", logs);
  const int r = rank.rank();
  const auto value = [&](int64_t rows, double x) { return at::full({rows, 2}, x); };
  const CollectiveScope scope("block.0");
  for (int round = 0; round < 2; ++round) {
    const CollectiveScope site(fmt::format("round.{}", round));
    expect_same(a.all_to_all(value(3, r), {1, 1, 1}, {1, 1, 1}).wait(),
                at::cat({value(1, 0), value(1, 1), value(1, 2)}), "all_to_all");
    expect_same(b.all_to_all(value(3, r), {r == 0 ? 3 : 0, 0, r == 0 ? 0 : 3},
                             {r == 0 ? 3 : 0, r == 2 ? 3 : 0, r == 2 ? 3 : 0})
                    .wait(),
                r == 0   ? value(3, 0)
                : r == 1 ? value(0, 0)
                         : at::cat({value(3, 1), value(3, 2)}),
                "uneven all_to_all");
    expect_same(a.all_gather(value(1, r), {1, 1, 1}).wait(),
                at::cat({value(1, 0), value(1, 1), value(1, 2)}), "all_gather");
    expect_same(a.reduce_scatter(value(3, r), {1, 1, 1}, Reduce::kMax).wait(), value(1, 2),
                "reduce_scatter");
    expect_same(b.all_reduce(value(1, r)).wait(), value(1, 3), "all_reduce");
    expect_same(b.all_reduce(value(1, r), Reduce::kAverage).wait(), value(1, 1), "mean");
    expect_same(b.broadcast(value(2, r), 1).wait(), value(2, 1), "broadcast");
    expect_same(a.exchange(value(1, r), (r + 1) % 3, {1, 2}, (r + 2) % 3).wait(),
                value(1, (r + 2) % 3), "exchange");
    a.barrier();
  }
}

}  // namespace

TEST_CASE("a recorded run and the simulator's own trace are equal", "[recording]") {
  Watchdog watchdog;
  sim::World world(3);
  const Logs logs = empty_logs(3);
  world.run([&](sim::RankContext& rank) { program(rank, logs); });
  for (int r = 0; r < 3; ++r) {
    const std::vector<CollectiveCall> recorded = logs[static_cast<size_t>(r)]->calls();
    REQUIRE(recorded.size() == 20);
    REQUIRE(recorded.size() == world.calls(r).size());
    for (size_t i = 0; i < recorded.size(); ++i) {
      INFO("rank " << r << ", call " << i);
      CHECK(recorded[i].to_json_line() == world.calls(r)[i].to_json_line());
      CHECK(recorded[i] == world.calls(r)[i]);
    }
  }
}

TEST_CASE("numbers count per group, and per peer for sends and receives", "[recording]") {
  Watchdog watchdog;
  sim::World world(3);
  const Logs logs = empty_logs(3);
  world.run([&](sim::RankContext& rank) { program(rank, logs); });
  std::string text;
  for (const CollectiveCall& call : logs[1]->calls()) {
    text += fmt::format("{}{} ", call.group, call.number);
  }
  CHECK(text == "a0 b0 a1 a2 b1 b2 b3 a0 a0 a3 a4 b4 a5 a6 b5 b6 b7 a1 a1 a7 ");
}

TEST_CASE("what is sent to a peer and what comes from it are counted apart", "[recording]") {
  Watchdog watchdog;
  sim::World world(2);
  const Logs logs = empty_logs(2);
  world.run([&](sim::RankContext& rank) {
    const Communicator pair = recorded(rank, "pair", logs);
    const int other = 1 - rank.rank();
    for (int i = 0; i < 2; ++i) pair.exchange(at::ones({1, 2}), other, {1, 2}, other).wait();
  });
  REQUIRE(logs[0]->calls().size() == 4);
  for (size_t i = 0; i < 4; ++i) {
    CHECK(logs[0]->calls()[i].number == static_cast<int64_t>(i / 2));
    CHECK(logs[0]->calls()[i] == world.calls(0)[i]);
  }
}

TEST_CASE("a log can be emptied and goes on", "[recording]") {
  CallLog log;
  CollectiveCall call;
  call.group = "a";
  log.add(call);
  CHECK((log.calls() == std::vector{call}));
  log.clear();
  CHECK(log.calls().empty());
  call.number = 1;
  log.add(call);
  CHECK((log.calls() == std::vector{call}));
}

TEST_CASE("the recorder looks like what it wraps", "[recording]") {
  Watchdog watchdog;
  sim::World world(2);
  world.run([](sim::RankContext& rank) {
    const auto inner = rank.create("a", {0, 1});
    const RecordingBackend outer(inner, "a", std::make_shared<CallLog>());
    tests::expect(outer.getBackendName() == "sim" && outer.supportsCoalescing(), "its abilities");
    tests::expect(outer.getRank() == rank.rank() && outer.getSize() == 2, "its place");
  });
}

}  // namespace shardproof::comm
