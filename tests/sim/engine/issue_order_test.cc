#include "sim/engine/issue_order.h"

#include <algorithm>
#include <numeric>
#include <random>

#include "tests/catch.h"

namespace shardproof::sim {
namespace {

using Steps = std::vector<std::vector<int64_t>>;
using Orders = std::vector<Steps>;

// Position of the step that holds `call`, -1 if the rank does not issue it.
int step_of(const Steps& steps, int64_t call) {
  for (size_t s = 0; s < steps.size(); ++s) {
    if (std::count(steps[s].begin(), steps[s].end(), call) > 0) return static_cast<int>(s);
  }
  return -1;
}

// A cycle that proves something: closed, and every edge is what that rank really does.
void require_real_cycle(const Orders& orders, const std::vector<OrderEdge>& cycle) {
  REQUIRE(!cycle.empty());
  for (size_t i = 0; i < cycle.size(); ++i) {
    REQUIRE(cycle[i].after == cycle[(i + 1) % cycle.size()].before);
    const Steps& steps = orders.at(static_cast<size_t>(cycle[i].rank));
    const int before = step_of(steps, cycle[i].before), after = step_of(steps, cycle[i].after);
    REQUIRE(before >= 0);
    REQUIRE(after > before);
  }
}

// Is there an order of all calls that every rank's steps follow? By trying all.
bool has_common_order(const Orders& orders, int64_t calls) {
  std::vector<int64_t> order(static_cast<size_t>(calls));
  std::iota(order.begin(), order.end(), 0);
  do {
    std::vector<int64_t> place(order.size());
    for (size_t i = 0; i < order.size(); ++i) {
      place[static_cast<size_t>(order[i])] = static_cast<int64_t>(i);
    }
    const auto follows = [&](const Steps& steps) {
      int64_t last = -1;
      for (const auto& step : steps) {
        int64_t highest = last;
        for (const int64_t call : step) {
          if (place[static_cast<size_t>(call)] < last) return false;
          highest = std::max(highest, place[static_cast<size_t>(call)]);
        }
        last = highest;
      }
      return true;
    };
    if (std::all_of(orders.begin(), orders.end(), follows)) return true;
  } while (std::next_permutation(order.begin(), order.end()));
  return false;
}

// Each rank issues a random selection of the calls in a random order, some of them together.
Orders random_orders(std::mt19937& random, int ranks, int64_t calls) {
  Orders orders;
  for (int r = 0; r < ranks; ++r) {
    std::vector<int64_t> mine(static_cast<size_t>(calls));
    std::iota(mine.begin(), mine.end(), 0);
    std::shuffle(mine.begin(), mine.end(), random);
    mine.resize(random() % (mine.size() + 1));
    Steps steps;
    for (const int64_t call : mine) {
      if (steps.empty() || random() % 3 != 0) steps.emplace_back();
      steps.back().push_back(call);
      if (random() % 5 == 0) steps.emplace_back();  // a step without a call
    }
    orders.push_back(steps);
  }
  return orders;
}

}  // namespace

TEST_CASE("orders that agree have no cycle", "[issue_order]") {
  CHECK(find_order_cycle({}, 0).empty());
  CHECK(find_order_cycle({{}, {}}, 0).empty());
  CHECK(find_order_cycle({{{0}, {1}, {2}}}, 3).empty());
  CHECK(find_order_cycle({{{0}, {1}, {2}}, {{0}, {1}, {2}}}, 3).empty());
  CHECK(find_order_cycle({{{0}, {1}}, {{1}, {2}}, {{0}, {2}}}, 3).empty());
}

TEST_CASE("two ranks that contradict each other are both named", "[issue_order]") {
  const Orders orders = {{{0}, {1}}, {{1}, {0}}};
  const auto cycle = find_order_cycle(orders, 2);
  require_real_cycle(orders, cycle);
  REQUIRE(cycle.size() == 2);
  CHECK(cycle[0].rank + cycle[1].rank == 1);
}

TEST_CASE("three ranks can contradict each other without any two doing so", "[issue_order]") {
  const Orders orders = {{{0}, {1}}, {{1}, {2}}, {{2}, {0}}};
  require_real_cycle(orders, find_order_cycle(orders, 3));
  CHECK(find_order_cycle(orders, 3).size() == 3);
}

TEST_CASE("the way to a cycle is no part of it", "[issue_order]") {
  const Orders orders = {{{0}, {1}, {2}, {3}}, {{3}, {2}}};
  const auto cycle = find_order_cycle(orders, 4);
  require_real_cycle(orders, cycle);
  CHECK(cycle.size() == 2);
}

TEST_CASE("calls that are issued together have no order among them", "[issue_order]") {
  CHECK(find_order_cycle({{{0, 1}}, {{1, 0}}}, 2).empty());
  CHECK(find_order_cycle({{{0, 1}}, {{0}, {1}}}, 2).empty());
  CHECK(find_order_cycle({{{0, 1}}, {{1}, {0}}}, 2).empty());
  // Two steps of a ring over two ranks.
  CHECK(find_order_cycle({{{0, 1}, {2, 3}}, {{1, 0}, {3, 2}}}, 4).empty());
}

TEST_CASE("steps have an order, whatever is in them", "[issue_order]") {
  const Orders orders = {{{0, 1}, {2}}, {{2}, {1}}};
  require_real_cycle(orders, find_order_cycle(orders, 3));
  const Orders both = {{{0, 1}, {2, 3}}, {{3}, {0}}};
  require_real_cycle(both, find_order_cycle(both, 4));
}

TEST_CASE("a step without a call does not break the order", "[issue_order]") {
  const Orders orders = {{{0}, {}, {1}}, {{}, {1}, {}, {}, {0}}};
  require_real_cycle(orders, find_order_cycle(orders, 2));
}

TEST_CASE("a call after itself is a cycle", "[issue_order]") {
  // A rank that sends to itself and receives in a later step.
  const Orders orders = {{{0}, {0}}};
  CHECK(find_order_cycle(orders, 1).size() == 1);
}

TEST_CASE("a cycle is found exactly where no common order exists", "[issue_order]") {
  std::mt19937 random(20240607);
  int cycles = 0;
  for (int round = 0; round < 3000; ++round) {
    const int64_t calls = 2 + static_cast<int64_t>(random() % 4);
    const Orders orders = random_orders(random, 2 + static_cast<int>(random() % 3), calls);
    const auto cycle = find_order_cycle(orders, calls);
    INFO("round " << round);
    REQUIRE(cycle.empty() == has_common_order(orders, calls));
    if (cycle.empty()) continue;
    require_real_cycle(orders, cycle);
    ++cycles;
  }
  // Both outcomes were tried.
  CHECK(cycles > 300);
  CHECK(cycles < 2700);
}

TEST_CASE("a long run needs no deep stack", "[issue_order]") {
  constexpr int64_t kCalls = 300000;
  Orders orders(2);
  for (int64_t c = 0; c < kCalls; ++c) {
    for (Steps& steps : orders) steps.push_back({c});
  }
  CHECK(find_order_cycle(orders, kCalls).empty());
  orders[1].push_back({0});  // again, after all others
  CHECK(static_cast<int64_t>(find_order_cycle(orders, kCalls).size()) == kCalls);
}

}  // namespace shardproof::sim
