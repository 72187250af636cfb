#include "sim/engine/issue_order.h"

#include <algorithm>

namespace shardproof::sim {
namespace {

// Every step becomes one node of its own: call -> step boundary -> next call would lose the
// grouping, so edges go from each call of a step to each call of the next step of that rank.
using Graph = std::vector<std::vector<OrderEdge>>;

Graph build(const std::vector<std::vector<std::vector<int64_t>>>& orders, int64_t calls) {
  Graph graph(static_cast<size_t>(calls));
  for (size_t rank = 0; rank < orders.size(); ++rank) {
    const std::vector<int64_t>* previous = nullptr;
    for (const auto& step : orders[rank]) {
      if (step.empty()) continue;
      if (previous) {
        for (int64_t a : *previous) {
          for (int64_t b : step) {
            graph[static_cast<size_t>(a)].push_back({static_cast<int>(rank), a, b});
          }
        }
      }
      previous = &step;
    }
  }
  return graph;
}

}  // namespace

std::vector<OrderEdge> find_order_cycle(
    const std::vector<std::vector<std::vector<int64_t>>>& orders, int64_t calls) {
  const Graph graph = build(orders, calls);
  enum : char { kNew, kOpen, kDone };
  std::vector<char> state(static_cast<size_t>(calls), kNew);
  std::vector<OrderEdge> path;                    // edges that lead to the node on top
  std::vector<std::pair<int64_t, size_t>> stack;  // node, next edge
  for (int64_t start = 0; start < calls; ++start) {
    if (state[static_cast<size_t>(start)] != kNew) continue;
    stack.emplace_back(start, 0);
    state[static_cast<size_t>(start)] = kOpen;
    while (!stack.empty()) {
      auto& [node, next] = stack.back();
      const auto& edges = graph[static_cast<size_t>(node)];
      if (next == edges.size()) {
        state[static_cast<size_t>(node)] = kDone;
        stack.pop_back();
        if (!path.empty()) path.pop_back();
        continue;
      }
      const OrderEdge edge = edges[next++];
      if (state[static_cast<size_t>(edge.after)] == kDone) continue;
      path.push_back(edge);
      if (state[static_cast<size_t>(edge.after)] == kOpen) {
        const auto begin = std::find_if(path.begin(), path.end(),
                                        [&](const OrderEdge& e) { return e.before == edge.after; });
        return {begin, path.end()};
      }
      state[static_cast<size_t>(edge.after)] = kOpen;
      stack.emplace_back(edge.after, 0);
    }
  }
  return {};
}

}  // namespace shardproof::sim
