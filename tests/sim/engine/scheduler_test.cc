#include "sim/engine/scheduler.h"

#include <algorithm>
#include <atomic>
#include <barrier>
#include <functional>
#include <set>
#include <string>
#include <thread>

#include "base/error.h"
#include "tests/catch.h"
#include "tests/sim/engine/watchdog.h"

namespace shardproof::sim {
namespace {

using tests::Watchdog;

// Runs `fn` on every rank's thread, between enter and leave.
void run(Scheduler& scheduler, const std::function<void(int)>& fn) {
  scheduler.start_run();
  std::vector<std::thread> threads;
  for (int r = 0; r < scheduler.ranks(); ++r) {
    threads.emplace_back([&, r] {
      scheduler.enter(r);
      fn(r);
      scheduler.leave(r);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// The ranks in the order in which they ran, each of them yielding `yields` times; one slot.
std::vector<int> order_of(int ranks, uint64_t seed, int yields = 4, bool spin = false) {
  Scheduler scheduler(ranks, 1, seed, spin);
  std::vector<int> order;  // no lock: with one slot one rank runs at a time
  run(scheduler, [&](int rank) {
    for (int i = 0; i < yields; ++i) {
      order.push_back(rank);
      scheduler.yield(rank);
    }
    order.push_back(rank);
  });
  return order;
}

void block(Scheduler& scheduler, int rank) {
  Scheduler::Lock lock(scheduler.mutex());
  scheduler.block(rank, lock);
}

ErrorKind kind_of_error(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.kind();
  }
  FAIL("expected an Error, none was thrown");
  return {};
}

}  // namespace

TEST_CASE("no more ranks run at a time than there are slots", "[scheduler]") {
  Watchdog watchdog;
  for (const int slots : {1, 2, 3, 8}) {
    for (const uint64_t seed : {0, 1, 2}) {
      Scheduler scheduler(6, slots, seed);
      std::atomic<int> inside{0}, most{0}, done{0};
      run(scheduler, [&](int rank) {
        for (int i = 0; i < 50; ++i) {
          const int now = ++inside;
          int seen = most.load();
          while (seen < now && !most.compare_exchange_weak(seen, now)) {
          }
          --inside;
          scheduler.yield(rank);
        }
        ++done;
      });
      INFO("slots " << slots << " seed " << seed);
      REQUIRE(done == 6);
      REQUIRE(most <= slots);
    }
  }
}

TEST_CASE("as many ranks run at once as there are slots", "[scheduler]") {
  Watchdog watchdog;  // ranks that are not inside together never meet
  Scheduler scheduler(5, 3, 0);
  std::barrier meeting(3);
  std::atomic<int> first_three{0};
  run(scheduler, [&](int) {
    if (first_three++ < 3) meeting.arrive_and_wait();
  });
  CHECK(first_three == 5);
}

TEST_CASE("without a seed the lowest ready rank runs first", "[scheduler]") {
  Watchdog watchdog;
  CHECK(order_of(3, 0, 0) == std::vector<int>{0, 1, 2});
  for (int repeat = 0; repeat < 50; ++repeat) REQUIRE(order_of(3, 0) == order_of(3, 0));
}

TEST_CASE("a rank that yields lets another one run, whatever the seed", "[scheduler]") {
  Watchdog watchdog;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const std::vector<int> order = order_of(2, seed);
    // With two ranks each of which yields after every step, the steps alternate.
    const std::vector<int> from_0 = {0, 1, 0, 1, 0, 1, 0, 1, 0, 1};
    const std::vector<int> from_1 = {1, 0, 1, 0, 1, 0, 1, 0, 1, 0};
    INFO("seed " << seed);
    REQUIRE((order == from_0 || (seed != 0 && order == from_1)));
  }
}

TEST_CASE("a rank that yields goes on at once when nobody else is ready", "[scheduler]") {
  Watchdog watchdog;
  CHECK(order_of(1, 0) == std::vector<int>(5, 0));
  CHECK(order_of(1, 7) == std::vector<int>(5, 0));
}

TEST_CASE("a seed permutes the order, the same seed gives the same order", "[scheduler]") {
  Watchdog watchdog;
  std::set<std::vector<int>> orders;
  std::set<int> first;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    const std::vector<int> order = order_of(4, seed);
    for (int repeat = 0; repeat < 5; ++repeat) {
      INFO("seed " << seed);
      REQUIRE(order_of(4, seed) == order);
    }
    orders.insert(order);
    first.insert(order[0]);
  }
  CHECK(orders.size() > 35);
  CHECK(first.size() == 4);
}

TEST_CASE("spinning before sleeping changes no order", "[scheduler]") {
  Watchdog watchdog;
  for (const uint64_t seed : {0, 3}) CHECK(order_of(3, seed, 2, true) == order_of(3, seed, 2));
}

TEST_CASE("a new run begins with the seed again", "[scheduler]") {
  Watchdog watchdog;
  Scheduler scheduler(4, 1, 5);
  std::vector<std::vector<int>> orders;
  for (int round = 0; round < 3; ++round) {
    std::vector<int> order;
    run(scheduler, [&](int rank) {
      for (int i = 0; i < 4; ++i) {
        order.push_back(rank);
        scheduler.yield(rank);
      }
    });
    orders.push_back(order);
  }
  CHECK(orders[0] == orders[1]);
  CHECK(orders[0] == orders[2]);
}

TEST_CASE("yielding at random needs a seed", "[scheduler]") {
  Watchdog watchdog;
  const auto order_with = [](uint64_t seed) {
    Scheduler scheduler(2, 1, seed);
    std::vector<int> order;
    run(scheduler, [&](int rank) {
      for (int i = 0; i < 20; ++i) {
        order.push_back(rank);
        scheduler.maybe_yield(rank);
      }
    });
    return order;
  };
  const std::vector<int> undisturbed = order_with(0);
  CHECK(std::is_sorted(undisturbed.begin(), undisturbed.end()));
  const std::vector<int> order = order_with(3);
  int changes = 0, stays = 0;
  for (size_t i = 1; i < order.size(); ++i) ++(order[i] == order[i - 1] ? stays : changes);
  CHECK(changes > 3);
  CHECK(stays > 3);
}

TEST_CASE("a blocked rank goes on when it is woken, and not before", "[scheduler]") {
  Watchdog watchdog;
  for (const int slots : {1, 2}) {
    Scheduler scheduler(2, slots, 0);
    std::vector<std::string> events;
    bool left_blocked = false;
    run(scheduler, [&](int rank) {
      if (rank == 0) {
        Scheduler::Lock lock(scheduler.mutex());
        scheduler.block(0, lock);
        events.push_back("0 goes on");
        return;
      }
      while (true) {  // with two slots rank 0 may still be on its way
        Scheduler::Lock lock(scheduler.mutex());
        if (scheduler.state(0) != Scheduler::State::kBlocked) continue;
        scheduler.wake(1);  // not blocked: nothing happens
        events.push_back("1 wakes");
        scheduler.wake(0);
        left_blocked = scheduler.state(0) != Scheduler::State::kBlocked;
        break;
      }
    });
    CHECK(left_blocked);
    CHECK(events == std::vector<std::string>{"1 wakes", "0 goes on"});
  }
}

TEST_CASE("a stall is noticed when the last rank that could act is gone", "[scheduler]") {
  Watchdog watchdog;
  for (const uint64_t seed : {0, 1, 2, 3}) {
    for (const int slots : {1, 2, 4}) {
      Scheduler scheduler(4, slots, seed);
      int stalls = 0, blocked = 0, finished = 0;
      scheduler.on_stall([&] {
        ++stalls;
        for (int r = 0; r < 4; ++r) {
          blocked += scheduler.state(r) == Scheduler::State::kBlocked;
          finished += scheduler.state(r) == Scheduler::State::kFinished;
        }
        scheduler.wake_all();
      });
      run(scheduler, [&](int rank) {
        scheduler.yield(rank);
        if (rank != 2) block(scheduler, rank);
      });
      INFO("seed " << seed << " slots " << slots);
      REQUIRE(stalls == 1);
      REQUIRE(blocked == 3);
      REQUIRE(finished == 1);
    }
  }
}

TEST_CASE("no stall while a rank has still to begin, is ready or runs", "[scheduler]") {
  Watchdog watchdog;
  Scheduler scheduler(3, 1, 0);
  bool stalled = false;
  scheduler.on_stall([&] { stalled = true; });
  run(scheduler, [&](int rank) {
    if (rank < 2) return block(scheduler, rank);
    for (int i = 0; i < 3; ++i) scheduler.yield(rank);
    Scheduler::Lock lock(scheduler.mutex());
    scheduler.wake_all();
  });
  CHECK(!stalled);
}

TEST_CASE("ranks that finish without blocking are no stall", "[scheduler]") {
  Watchdog watchdog;
  Scheduler scheduler(3, 2, 0);
  bool stalled = false;
  scheduler.on_stall([&] { stalled = true; });
  for (int round = 0; round < 20; ++round) run(scheduler, [&](int rank) { scheduler.yield(rank); });
  CHECK(!stalled);
}

TEST_CASE("every rank ends as finished", "[scheduler]") {
  Watchdog watchdog;
  Scheduler scheduler(3, 1, 0);
  scheduler.start_run();
  {
    Scheduler::Lock lock(scheduler.mutex());
    CHECK(scheduler.state(1) == Scheduler::State::kExpected);
  }
  run(scheduler, [](int) {});
  Scheduler::Lock lock(scheduler.mutex());
  for (int r = 0; r < 3; ++r) CHECK(scheduler.state(r) == Scheduler::State::kFinished);
}

TEST_CASE("misuse of the scheduler is an internal error", "[scheduler]") {
  Watchdog watchdog;
  CHECK(kind_of_error([] { Scheduler(0, 1, 0); }) == ErrorKind::kInternal);
  CHECK(kind_of_error([] { Scheduler(1, 0, 0); }) == ErrorKind::kInternal);
  Scheduler scheduler(1, 1, 0);
  scheduler.start_run();
  scheduler.enter(0);
  CHECK(kind_of_error([&] { scheduler.enter(0); }) == ErrorKind::kInternal);
  CHECK(kind_of_error([&] { scheduler.start_run(); }) == ErrorKind::kInternal);
  scheduler.leave(0);
}

}  // namespace shardproof::sim
