#include "verify/shrink.h"

#include <vector>

namespace shardproof::verify {
namespace {

using Step = std::function<void(AttentionCase&)>;

// Each step simplifies one thing; the boldest come first.
const std::vector<Step>& steps() {
  static const std::vector<Step> all = {
      [](AttentionCase& c) { c.mesh.dp = 1; },
      [](AttentionCase& c) { c.batch = 1; },
      [](AttentionCase& c) { c.text = 0, c.text_placement = plan::StreamPlacement::kSharded; },
      [](AttentionCase& c) { c.mask = MaskKind::kNone; },
      [](AttentionCase& c) { c.strided = false; },
      [](AttentionCase& c) { c.text_placement = plan::StreamPlacement::kSharded; },
      [](AttentionCase& c) { c.kv_heads = c.heads; },
      [](AttentionCase& c) { c.token_split = plan::TokenSplit::kUneven; },
      [](AttentionCase& c) { c.head_split = plan::HeadSplit::kEven; },
      [](AttentionCase& c) { c.mesh.ring /= 2; },
      [](AttentionCase& c) { c.mesh.ulysses /= 2; },
      [](AttentionCase& c) { c.mesh.ring -= 1; },
      [](AttentionCase& c) { c.mesh.ulysses -= 1; },
      [](AttentionCase& c) { c.image /= 2; },
      [](AttentionCase& c) { c.text /= 2; },
      [](AttentionCase& c) { c.heads /= 2, c.kv_heads = (c.kv_heads + 1) / 2; },
      [](AttentionCase& c) { c.head_dim /= 2; },
      [](AttentionCase& c) { c.image -= 1; },
      [](AttentionCase& c) { c.text -= 1; },
      [](AttentionCase& c) { c.heads -= 1, c.kv_heads = c.heads; },
  };
  return all;
}

bool is_possible(const AttentionCase& c) {
  if (c.mesh.ring < 1 || c.mesh.ulysses < 1 || c.image < 0 || c.text < 0 || c.tokens() < 1 ||
      c.heads < 1 || c.kv_heads < 1 || c.heads % c.kv_heads != 0 || c.head_dim < 1) {
    return false;
  }
  try {
    c.make_plan();
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

}  // namespace

AttentionCase shrink(const AttentionCase& failing,
                     const std::function<bool(const AttentionCase&)>& fails, int budget) {
  AttentionCase best = failing;
  bool progress = true;
  while (progress && budget > 0) {
    progress = false;
    for (const Step& step : steps()) {
      AttentionCase smaller = best;
      step(smaller);
      if (smaller.id() == best.id() || !is_possible(smaller)) continue;
      if (budget-- <= 0) break;
      if (!fails(smaller)) continue;
      best = smaller;
      progress = true;
    }
  }
  return best;
}

}  // namespace shardproof::verify
