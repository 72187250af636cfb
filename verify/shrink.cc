#include "verify/shrink.h"

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

const std::vector<std::function<void(ModelCase&)>>& model_steps() {
  static const std::vector<std::function<void(ModelCase&)>> all = {
      [](ModelCase& c) { c.mesh.dp = 1; },
      [](ModelCase& c) { c.layers = 1; },
      [](ModelCase& c) { c.batch = 1; },
      [](ModelCase& c) { c.guided = false; },
      [](ModelCase& c) { c.recompute = false; },
      [](ModelCase& c) { c.lora = false; },
      [](ModelCase& c) { c.dropout = false; },
      [](ModelCase& c) { c.text_aligned = false; },
      [](ModelCase& c) { c.ragged = false; },
      [](ModelCase& c) { c.parallel.text_placement = plan::StreamPlacement::kSharded; },
      [](ModelCase& c) { c.parallel.token_split = plan::TokenSplit::kUneven; },
      [](ModelCase& c) { c.parallel.head_split = plan::HeadSplit::kEven; },
      [](ModelCase& c) { c.mesh.ring /= 2; },
      [](ModelCase& c) { c.mesh.ulysses /= 2; },
      [](ModelCase& c) { c.mesh.ring -= 1; },
      [](ModelCase& c) { c.mesh.ulysses -= 1; },
      [](ModelCase& c) { c.grid[0] /= 2; },
      [](ModelCase& c) { c.grid[1] /= 2; },
      [](ModelCase& c) { c.grid[2] /= 2; },
      [](ModelCase& c) { c.text /= 2; },
      [](ModelCase& c) { c.heads /= 2; },
      [](ModelCase& c) { c.heads -= 1; },
  };
  return all;
}

// What the id's own rules allow, on a mesh that splits the heads.
bool is_possible(const ModelCase& c) {
  if (c.mesh.ring < 1 || c.mesh.ulysses < 1) return false;
  try {
    ModelCase::parse(c.id());
    AttentionCase attention;
    attention.mesh = c.mesh;
    attention.heads = attention.kv_heads = c.heads;
    attention.head_split = c.parallel.head_split;
    attention.make_plan();
  } catch (const std::exception&) {
    return false;
  }
  return true;
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
  const auto possible = [](const AttentionCase& c) { return is_possible(c); };
  return shrink_by<AttentionCase>(steps(), possible, failing, fails, budget);
}

ModelCase shrink(const ModelCase& failing, const std::function<bool(const ModelCase&)>& fails,
                 int budget) {
  const auto possible = [](const ModelCase& c) { return is_possible(c); };
  return shrink_by<ModelCase>(model_steps(), possible, failing, fails, budget);
}

}  // namespace shardproof::verify
