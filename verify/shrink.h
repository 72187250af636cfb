// Makes a failing case small.
#pragma once
#include <functional>
#include <vector>

#include "verify/attention/attention_case.h"
#include "verify/models/model_case.h"

namespace shardproof::verify {

// Takes steps, each of which simplifies one thing (the boldest first), as long as `fails` holds, at
// most `budget` calls of it. `possible` says which cases can be built. Returns the smallest failing
// case found (the given one if none is smaller).
template <class C>
C shrink_by(const std::vector<std::function<void(C&)>>& steps,
            const std::function<bool(const C&)>& possible, const C& failing,
            const std::function<bool(const C&)>& fails, int budget) {
  C best = failing;
  bool progress = true;
  while (progress && budget > 0) {
    progress = false;
    for (const auto& step : steps) {
      C smaller = best;
      step(smaller);
      if (smaller.id() == best.id() || !possible(smaller)) continue;
      if (budget-- <= 0) break;
      if (!fails(smaller)) continue;
      best = smaller;
      progress = true;
    }
  }
  return best;
}

AttentionCase shrink(const AttentionCase& failing,
                     const std::function<bool(const AttentionCase&)>& fails, int budget = 60);
ModelCase shrink(const ModelCase& failing, const std::function<bool(const ModelCase&)>& fails,
                 int budget = 40);

}  // namespace shardproof::verify
