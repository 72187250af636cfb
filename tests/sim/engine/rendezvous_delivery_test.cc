// What arrives, for every interleaving: the same bytes.
#include <algorithm>
#include <atomic>
#include <cmath>

#include "tests/sim/engine/plain_world.h"
#include "tests/sim/engine/violation.h"
#include "tests/sim/engine/watchdog.h"

namespace shardproof::sim {
namespace {

using tests::all_ranks;
using tests::Buffer;
using tests::expect;
using tests::PlainRank;
using tests::PlainWorld;
using tests::Watchdog;

bool all_nan(const Buffer& x) {
  return std::all_of(x.begin(), x.end(), [](double v) { return std::isnan(v); });
}

// Element k that `rank` has for `round`; exact in double.
double element(int rank, int round, size_t k) {
  return 1000.0 * rank + 100.0 * round + static_cast<double>(k);
}

Buffer elements(int rank, int round, size_t n) {
  Buffer x;
  for (size_t k = 0; k < n; ++k) x.push_back(element(rank, round, k));
  return x;
}

// Four ranks: collectives of all, of pairs and of rows, two in flight at a time, buffers reused as
// soon as the waits allow, a ring of coalesced sends and receives, a sum, and a barrier.
void mixed_program(PlainRank& rank, Buffer& log) {
  const int r = rank.rank();
  const auto me = static_cast<size_t>(r);
  const int64_t world = rank.join("world", all_ranks(4));
  const int64_t pair = rank.join("pair", r < 2 ? std::vector{0, 1} : std::vector{2, 3});
  const int64_t row = rank.join("row", {r % 2, r % 2 + 2});
  Buffer for_world, for_pair(4);
  for (int round = 0; round < 3; ++round) {
    for_world = elements(r, round, 8);
    Buffer from_world(8), from_pair(4), from_row(4), from_ring(3), total(8);
    auto a = rank.all_to_all(world, 4, me, "a", for_world, from_world);
    for_pair = elements(r, round + 10, 4);
    auto b = rank.all_to_all(pair, 2, me % 2, "b", for_pair, from_pair);
    rank.wait(b);
    for_pair.assign(4, -1.0);  // others may have to read it yet
    rank.wait(a);
    auto c = rank.all_to_all(row, 2, me / 2, "c", from_pair, from_row);
    const Buffer sent(from_world.begin(), from_world.begin() + 3);
    rank.rendezvous().begin_step(r);
    auto to_next = rank.send(world, (r + 1) % 4, "ring", sent);
    auto from_last = rank.receive(world, (r + 3) % 4, "ring", from_ring);
    rank.rendezvous().end_step(r);
    rank.wait(from_last);
    rank.wait(to_next);
    rank.wait(c);
    rank.wait(rank.sum(world, "sum", for_world, total));
    rank.wait(rank.barrier(world, "barrier"));
    for (const Buffer* x : {&from_world, &from_pair, &from_row, &from_ring, &total}) {
      log.insert(log.end(), x->begin(), x->end());
    }
  }
}

// The same by direct indexing.
Buffer expected_log(int r) {
  const auto me = static_cast<size_t>(r);
  const auto world_share = [](int rank, int round, size_t k) {  // element k of from_world
    return element(static_cast<int>(k / 2), round, static_cast<size_t>(rank) * 2 + k % 2);
  };
  const auto pair_share = [](int rank, int round, size_t k) {
    const int first = rank / 2 * 2;
    return element(first + static_cast<int>(k / 2), round + 10,
                   static_cast<size_t>(rank % 2) * 2 + k % 2);
  };
  Buffer log;
  for (int round = 0; round < 3; ++round) {
    for (size_t k = 0; k < 8; ++k) log.push_back(world_share(r, round, k));
    for (size_t k = 0; k < 4; ++k) log.push_back(pair_share(r, round, k));
    for (size_t k = 0; k < 4; ++k) {
      const int from = r % 2 + 2 * static_cast<int>(k / 2);
      log.push_back(pair_share(from, round, me / 2 * 2 + k % 2));
    }
    for (size_t k = 0; k < 3; ++k) log.push_back(world_share((r + 3) % 4, round, k));
    for (size_t k = 0; k < 8; ++k) {
      double sum = 0;
      for (int from = 0; from < 4; ++from) sum += element(from, round, k);
      log.push_back(sum);
    }
  }
  return log;
}

}  // namespace

TEST_CASE("a thousand schedules deliver the same bytes", "[rendezvous]") {
  Watchdog watchdog;
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    PlainWorld world(4, 1 + static_cast<int>(seed % 4), seed);
    std::vector<Buffer> logs(4);
    world.run(
        [&](PlainRank& rank) { mixed_program(rank, logs[static_cast<size_t>(rank.rank())]); });
    INFO("schedule seed " << seed);
    for (int r = 0; r < 4; ++r) REQUIRE(logs[static_cast<size_t>(r)] == expected_log(r));
  }
}

TEST_CASE("ranks that spin before they sleep deliver the same bytes", "[rendezvous]") {
  Watchdog watchdog;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    PlainWorld world(4, 1 + static_cast<int>(seed % 2), seed, /*spin=*/true);
    std::vector<Buffer> logs(4);
    world.run(
        [&](PlainRank& rank) { mixed_program(rank, logs[static_cast<size_t>(rank.rank())]); });
    for (int r = 0; r < 4; ++r) REQUIRE(logs[static_cast<size_t>(r)] == expected_log(r));
  }
}

TEST_CASE("outputs are poison until the wait and complete after it", "[rendezvous]") {
  Watchdog watchdog;
  PlainWorld world(2);
  world.run([](PlainRank& rank) {
    const int64_t group = rank.join("world", {0, 1});
    const Buffer input = elements(rank.rank(), 0, 4);
    Buffer output(4, 5.0);
    auto ticket = rank.all_to_all(group, 2, static_cast<size_t>(rank.rank()), "x", input, output);
    expect(all_nan(output), "poison after the post");
    // Even when all members have posted: what arrives early must not be relied on.
    for (int i = 0; i < 4; ++i) rank.scheduler().yield(rank.rank());
    expect(all_nan(output), "poison until the wait");
    rank.wait(ticket);
    expect(!std::any_of(output.begin(), output.end(), [](double v) { return std::isnan(v); }),
           "no poison after the wait");
  });
}

TEST_CASE("a second wait changes nothing", "[rendezvous]") {
  Watchdog watchdog;
  PlainWorld world(2);
  world.run([](PlainRank& rank) {
    const int64_t group = rank.join("world", {0, 1});
    const Buffer input = elements(rank.rank(), 0, 4);
    Buffer output(4);
    auto ticket = rank.all_to_all(group, 2, static_cast<size_t>(rank.rank()), "x", input, output);
    rank.wait(ticket);
    output.assign(4, 7.0);
    rank.wait(ticket);
    expect(output == Buffer(4, 7.0), "the output is the caller's after the first wait");
  });
}

TEST_CASE("buffers may be reused after the wait although others have yet to read", "[rendezvous]") {
  Watchdog watchdog;
  for (const uint64_t seed : {0, 1, 2, 3}) {
    PlainWorld world(3, 3, seed);
    world.run([](PlainRank& rank) {
      const int64_t group = rank.join("world", all_ranks(3));
      const auto me = static_cast<size_t>(rank.rank());
      Buffer input = elements(rank.rank(), 0, 6), output(6);
      auto ticket = rank.all_to_all(group, 3, me, "x", input, output);
      if (rank.rank() == 2) {
        // Its wait is late: by then the others have overwritten and freed what it reads.
        auto all_gone = rank.barrier(group, "late");
        rank.wait(all_gone);
        rank.wait(ticket);
      } else {
        rank.wait(ticket);
        input.assign(6, -1.0);
        input = Buffer();
        auto gone = rank.barrier(group, "late");
        rank.wait(gone);
      }
      for (size_t k = 0; k < 6; ++k) {
        expect(output[k] == element(static_cast<int>(k / 2), 0, me * 2 + k % 2), "what was sent");
      }
    });
  }
}

TEST_CASE("a send can be waited for before its receive has been", "[rendezvous]") {
  Watchdog watchdog;
  PlainWorld world(2);
  Buffer received(3);
  world.run([&](PlainRank& rank) {
    const int64_t group = rank.join("world", {0, 1});
    if (rank.rank() == 0) {
      Buffer sent = elements(0, 0, 3);
      rank.wait(rank.send(group, 1, "x", sent));
      sent.assign(3, -1.0);
      rank.wait(rank.barrier(group, "sent"));
    } else {
      auto ticket = rank.receive(group, 0, "x", received);
      rank.wait(rank.barrier(group, "sent"));
      rank.wait(ticket);
    }
  });
  CHECK(received == elements(0, 0, 3));
}

TEST_CASE("a call that is given up delivers to the others only and is reported", "[rendezvous]") {
  // With one slot and no seed the ranks run in order and as long as they can: those that begin with
  // a yield post after rank 1 has given up. Otherwise all have posted by then.
  for (const bool early : {true, false}) {
    for (const uint64_t seed : {0, 1, 2, 3}) {
      if (early && seed != 0) continue;
      Watchdog watchdog;
      PlainWorld world(3, early ? 1 : 2, seed);
      std::vector<std::weak_ptr<Part>> parts(3);
      std::vector<Buffer> outputs(3, Buffer(6));
      int posted = 0, posted_at_abandon = 0;
      const auto program = [&](PlainRank& rank) {
        const auto me = static_cast<size_t>(rank.rank());
        const int64_t group = rank.join("world", all_ranks(3));
        Buffer input = elements(rank.rank(), 0, 6);
        if (me != 1 && early) rank.scheduler().yield(rank.rank());
        auto ticket = rank.all_to_all(group, 3, me, "x", input, outputs[me]);
        parts[me] = ticket->call->parts[me];
        if (early) ++posted;
        if (!early) rank.wait(rank.barrier(group, "posted"));
        if (me == 1) {
          posted_at_abandon = posted;
          rank.rendezvous().abandon(*ticket);
          rank.rendezvous().abandon(*ticket);  // once more changes nothing, nor does a wait
          rank.wait(ticket);
          input.assign(6, -1.0);
        } else {
          rank.wait(ticket);
        }
      };
      const CollectiveError error = tests::violation_of([&] { world.run(program); });
      tests::require_violation(error, ViolationKind::kUnwaited);
      tests::require_text(error, {"rank 1 returned without waiting for its all_to_all"});
      CHECK(posted_at_abandon == (early ? 1 : 0));
      for (size_t r = 0; r < 3; ++r) {
        CHECK(parts[r].expired());
        for (size_t k = 0; k < 6 && r != 1; ++k) {
          REQUIRE(outputs[r][k] == element(static_cast<int>(k / 2), 0, r * 2 + k % 2));
        }
      }
      CHECK(all_nan(outputs[1]));
    }
  }
}

TEST_CASE("messages between two ranks keep their order, other pairs do not matter",
          "[rendezvous]") {
  Watchdog watchdog;
  PlainWorld world(3);
  std::vector<Buffer> got(3, Buffer(1));
  world.run([&](PlainRank& rank) {
    const int64_t group = rank.join("world", all_ranks(3));
    const Buffer one = {1}, two = {2}, three = {3};
    if (rank.rank() == 0) {
      auto a = rank.send(group, 2, "x", one), b = rank.send(group, 2, "x", two);
      rank.wait(a);
      rank.wait(b);
    } else if (rank.rank() == 1) {
      rank.wait(rank.send(group, 2, "x", three));
    } else {
      auto c = rank.receive(group, 1, "x", got[2]);
      auto a = rank.receive(group, 0, "x", got[0]), b = rank.receive(group, 0, "x", got[1]);
      rank.wait(b);
      rank.wait(a);
      rank.wait(c);
    }
  });
  CHECK(got == std::vector<Buffer>{{1}, {2}, {3}});
}

TEST_CASE("a rank can send to itself in one step", "[rendezvous]") {
  Watchdog watchdog;
  PlainWorld world(2);
  world.run([&](PlainRank& rank) {
    const int64_t group = rank.join("world", {0, 1});
    const Buffer input = elements(rank.rank(), 0, 2);
    Buffer output(2);
    rank.rendezvous().begin_step(rank.rank());
    auto a = rank.send(group, rank.rank(), "x", input);
    auto b = rank.receive(group, rank.rank(), "x", output);
    rank.rendezvous().end_step(rank.rank());
    rank.wait(a);
    rank.wait(b);
    expect(output == input, "its own message");
  });
}

TEST_CASE("a barrier holds ranks until all have come", "[rendezvous]") {
  Watchdog watchdog;
  for (uint64_t seed = 0; seed < 50; ++seed) {
    PlainWorld world(4, 2, seed);
    std::atomic<int> come{0};
    world.run([&](PlainRank& rank) {
      const int64_t group = rank.join("world", all_ranks(4));
      for (int round = 1; round <= 3; ++round) {
        ++come;
        rank.wait(rank.barrier(group, "b"));
        expect(come >= 4 * round, "all ranks come before one goes");
        rank.wait(rank.barrier(group, "b"));  // nobody runs ahead into the next round
      }
    });
  }
}

TEST_CASE("the value that members share is computed once", "[rendezvous]") {
  // A part that counts in place of computing.
  class Counted final : public tests::PlainPart {
   public:
    explicit Counted(std::atomic<int>& count) : PlainPart(nullptr, nullptr), count_(count) {}
    void deliver(const std::vector<std::shared_ptr<Part>>&, SharedResult& shared) override {
      std::lock_guard lock(shared.mutex);
      if (shared.value) return;
      shared.value = std::make_shared<int>(1);
      ++count_;
    }

   private:
    std::atomic<int>& count_;
  };
  Watchdog watchdog;
  PlainWorld world(4);
  std::atomic<int> computed{0};
  world.run([&](PlainRank& rank) {
    const int64_t group = rank.join("world", all_ranks(4));
    for (int call = 0; call < 5; ++call) {
      CollectiveCall barrier;
      rank.wait(rank.post(group, barrier, std::make_shared<Counted>(computed)));
    }
  });
  CHECK(computed == 5);
}

TEST_CASE("parts are given back as soon as nobody has to read them", "[rendezvous]") {
  Watchdog watchdog;
  PlainWorld world(2, 1);
  std::vector<std::weak_ptr<Part>> parts(2);
  std::vector<PlainRank::Ticket> kept(2);
  world.run([&](PlainRank& rank) {
    const auto me = static_cast<size_t>(rank.rank());
    const int64_t group = rank.join("world", {0, 1});
    auto part = std::make_shared<tests::PlainPart>(nullptr, nullptr);
    parts[me] = part;
    CollectiveCall barrier;
    kept[me] = rank.post(group, barrier, std::move(part));
    rank.wait(kept[me]);
    rank.wait(rank.barrier(group, "both have waited"));
    expect(parts[0].expired() && parts[1].expired(), "no part is held any longer");
  });
}

TEST_CASE("the calls of a rank are recorded in order with group and number", "[rendezvous]") {
  Watchdog watchdog;
  PlainWorld world(2);
  const auto program = [](PlainRank& rank) {
    const int64_t a = rank.join("a", {0, 1}), b = rank.join("b", {0, 1});
    const int other = 1 - rank.rank();
    const Buffer input(2);
    Buffer output(2), received(2);
    rank.wait(rank.sum(a, "first", input, output));
    rank.wait(rank.barrier(b, "second"));
    rank.rendezvous().begin_step(rank.rank());
    auto sent = rank.send(b, other, "third", input);
    auto got = rank.receive(b, other, "third", received);
    rank.rendezvous().end_step(rank.rank());
    rank.wait(sent);
    rank.wait(got);
    rank.wait(rank.barrier(a, "fourth"));
  };
  for (int run = 0; run < 2; ++run) {  // a second run counts from zero
    world.run(program);
    for (const int r : {0, 1}) {
      std::string text;
      for (const CollectiveCall& call : world.rendezvous().calls(r)) {
        text +=
            fmt::format("{} {} {} {}\n", call.group, call.number, to_string(call.kind), call.tag);
      }
      CHECK(text ==
            "a 0 all_reduce first\nb 0 barrier second\nb 0 send third\n"
            "b 0 recv third\na 1 barrier fourth\n");
    }
  }
}

TEST_CASE("groups of one name and of other ranks do not meet", "[rendezvous]") {
  Watchdog watchdog;
  PlainWorld world(4);
  std::vector<Buffer> totals(4, Buffer(1));
  world.run([&](PlainRank& rank) {
    const int r = rank.rank();
    const int64_t group = rank.join("pair", r < 2 ? std::vector{0, 1} : std::vector{2, 3});
    const int64_t again = rank.join("pair", r < 2 ? std::vector{0, 1} : std::vector{2, 3});
    expect(group != again, "a second group of the same members is another one");
    const Buffer input = {std::pow(10, r)};
    rank.wait(rank.sum(again, "x", input, totals[static_cast<size_t>(r)]));
  });
  CHECK(totals == std::vector<Buffer>{{11}, {11}, {1100}, {1100}});
}

}  // namespace shardproof::sim
