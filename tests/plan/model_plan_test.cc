// Plans of models as data: found by tensor, printed as a table.
#include "plan/model_plan.h"

#include "tests/catch.h"

namespace shardproof::plan {
namespace {

const ModelPlan kPlan = {
    {"", "hidden_states", TensorUse::kSplit, "image", 3, 1},
    {"pos_embed", "rope", TensorUse::kSplit, "image", 2, 0, true},
    {"proj_out", "output", TensorUse::kGather, "image", 3, 1},
    {"", "timestep", TensorUse::kWhole},
};

TEST_CASE("model plan: rules are found by tensor", "[plan]") {
  REQUIRE(find_rule(kPlan, "rope"));
  CHECK(find_rule(kPlan, "rope")->dim == 0);
  CHECK(find_rule(kPlan, "output")->use == TensorUse::kGather);
  CHECK(find_rule(kPlan, "hidden_state") == nullptr);
}

TEST_CASE("model plan: the table says what happens where", "[plan]") {
  CHECK(to_table(kPlan) ==
        "tensor         at         use                              stream\n"
        "hidden_states  model      split along dimension 1 of 3     image\n"
        "rope           pos_embed  split along dimension 0 of 2     image (optional)\n"
        "output         proj_out   gathered along dimension 1 of 3  image\n"
        "timestep       model      whole on every rank\n");
}

}  // namespace
}  // namespace shardproof::plan
