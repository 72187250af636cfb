#include "verify/suites/covering_array.h"

#include <set>
#include <tuple>

#include "verify/suites/draw.h"

namespace shardproof::verify {
namespace {

// Factor a has value x while factor b has y; a == b: factor a has value x.
using Pair = std::tuple<size_t, int, size_t, int>;

std::vector<Pair> pairs_of(const Combination& c, int strength) {
  std::vector<Pair> pairs;
  for (size_t a = 0; a < c.size(); ++a) {
    pairs.emplace_back(a, c[a], a, c[a]);
    for (size_t b = a + 1; strength > 1 && b < c.size(); ++b) pairs.emplace_back(a, c[a], b, c[b]);
  }
  return pairs;
}

std::set<Pair> all_pairs(const std::vector<int>& levels, int strength) {
  std::set<Pair> pairs;
  for (size_t a = 0; a < levels.size(); ++a) {
    for (int x = 0; x < levels[a]; ++x) {
      pairs.emplace(a, x, a, x);
      for (size_t b = a + 1; strength > 1 && b < levels.size(); ++b) {
        for (int y = 0; y < levels[b]; ++y) pairs.emplace(a, x, b, y);
      }
    }
  }
  return pairs;
}

// A random combination that holds `pair`.
Combination draw_with(const Pair& pair, const std::vector<int>& levels, Draw& draw) {
  Combination c;
  for (const int level : levels) c.push_back(static_cast<int>(draw.between(0, level - 1)));
  c[std::get<0>(pair)] = std::get<1>(pair);
  c[std::get<2>(pair)] = std::get<3>(pair);
  return c;
}

size_t uncovered_in(const Combination& c, const std::set<Pair>& open, int strength) {
  size_t count = 0;
  for (const Pair& pair : pairs_of(c, strength)) count += open.count(pair);
  return count;
}

}  // namespace

std::vector<Combination> covering_array(const std::vector<int>& levels, int strength,
                                        const std::function<bool(const Combination&)>& allowed) {
  constexpr int kTries = 60;
  std::vector<Combination> rows;
  std::set<Pair> open = all_pairs(levels, strength);
  Draw draw(20260331);
  while (!open.empty()) {
    const Pair wanted = *open.begin();
    Combination best;
    size_t most = 0;
    for (int i = 0; i < kTries; ++i) {
      Combination c = draw_with(wanted, levels, draw);
      if (!allowed(c)) continue;
      const size_t count = uncovered_in(c, open, strength);
      if (count > most) most = count, best = std::move(c);
    }
    open.erase(wanted);  // found, or impossible
    if (best.empty()) continue;
    for (const Pair& pair : pairs_of(best, strength)) open.erase(pair);
    rows.push_back(std::move(best));
  }
  return rows;
}

}  // namespace shardproof::verify
