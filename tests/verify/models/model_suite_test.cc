// The suite holds every model, mode, dtype and feature, and passes.
#include "verify/suites/model_suite.h"

#include "tests/catch.h"

#include <map>
#include <set>

#include "verify/dtype.h"
#include "verify/models/model_check.h"
#include "verify/runner.h"

namespace shardproof::verify {
namespace {

std::set<std::string> features(const std::vector<ModelCase>& cases) {
  std::set<std::string> seen;
  for (const ModelCase& c : cases) {
    seen.insert({c.subject, c.mode(), dtype_name(c.dtype),
                 comm::MeshShape{1, c.mesh.ring, c.mesh.ulysses}.to_string()});
    if (c.ragged) seen.insert("ragged");
    if (c.guided) seen.insert("cfg");
    if (c.text_aligned) seen.insert("textalign");
    if (c.lora) seen.insert("lora");
    if (c.recompute) seen.insert("recompute");
    if (c.dropout) seen.insert("drop");
    if (c.text < c.mesh.sp()) seen.insert("short text");
    if (c.image_tokens() % c.mesh.sp() != 0) seen.insert("uneven image");
    if (c.mesh.dp > 1) seen.insert("replicas");
    seen.insert(std::string("convention ") + plan::to_string(c.parallel.convention));
    seen.insert(std::string("heads ") + plan::to_string(c.parallel.head_split));
    seen.insert(std::string("tokens ") + plan::to_string(c.parallel.token_split));
    if (c.parallel.text_placement == plan::StreamPlacement::kReplicated) seen.insert("textrep");
  }
  return seen;
}

TEST_CASE("model suite: whole and quick hold the same features", "[verify][models]") {
  const auto all = features(model_suite({}, 1, false)), quick = features(model_suite({}, 1, true));
  for (const char* feature :
       {"ragged", "cfg", "textalign", "lora", "recompute", "drop", "short text", "uneven image",
        "replicas", "textrep", "convention A", "convention B", "convention C", "dp1.ring1.ulysses8",
        "dp1.ring1.ulysses3", "dp1.ring4.ulysses1", "dp1.ring2.ulysses4", "hybrid_allgather"}) {
    INFO(feature);
    CHECK(all.contains(feature));
  }
  for (const std::string& feature : all) {
    INFO(feature);
    CHECK(quick.contains(feature));
  }
}

TEST_CASE("model suite: in fp64 every model meets every mesh and variant", "[verify][models]") {
  CaseFilter filter;
  filter.dtypes = {c10::ScalarType::Double};
  std::map<std::string, int> per_model;
  for (const ModelCase& c : model_suite(filter, 1, false)) ++per_model[c.subject];
  REQUIRE(per_model.size() == 5);
  for (const auto& [subject, count] : per_model) CHECK(count == 66);
}

TEST_CASE("model suite: the quick part holds", "[verify][models]") {
  for (const CaseResult& result : run_cases(model_checks(model_suite({}, 2, true)), {})) {
    INFO(result.id << " " << result.reason << " " << result.first_wrong);
    CHECK(result.status == Status::kPass);
  }
}

}  // namespace
}  // namespace shardproof::verify
