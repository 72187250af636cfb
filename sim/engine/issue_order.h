// Do the orders in which ranks issue their collectives have a common order?
#pragma once
#include <cstdint>
#include <vector>

namespace shardproof::sim {

struct OrderEdge {
  int rank;  // this rank issues `before` before `after`
  int64_t before;
  int64_t after;
};

// orders[rank][step] = ids (0..calls-1) of the calls issued together in that step. Returns a cycle
// of the union of all orders, or nothing. Linear in the number of calls.
std::vector<OrderEdge> find_order_cycle(
    const std::vector<std::vector<std::vector<int64_t>>>& orders, int64_t calls);

}  // namespace shardproof::sim
