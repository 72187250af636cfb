// The catalogue is complete, and what can be planted of it is caught.
#include <nlohmann/json.hpp>
#include <set>

#include "tests/catch.h"
#include "tests/file_support.h"
#include "verify/mutants/mutant_pair.h"
#include "verify/mutants/mutant_report.h"

namespace shardproof::verify {
namespace {

Mutant find(const std::string& id) {
  for (const Mutant& mutant : mutant_catalogue()) {
    if (mutant.id == id) return mutant;
  }
  FAIL("no mutant " << id);
  return {};
}

TEST_CASE("mutants: every entry says what it is", "[mutants]") {
  std::set<std::string> ids;
  for (const Mutant& mutant : mutant_catalogue()) {
    INFO(mutant.id);
    CHECK(ids.insert(mutant.id).second);
    CHECK_FALSE(mutant.text.empty());
    CHECK_FALSE(mutant.kind.empty());
    CHECK((mutant.source == "ours" || mutant.link.starts_with("https://github.com/")));
    CHECK(mutant.inexpressible.empty() == !mutant.plants.empty());
    if (mutant.plants.empty()) continue;
    CHECK_FALSE(mutant.cause.empty());
    CHECK_FALSE(mutant.first_wrong.empty());
  }
  // The public catalogue has 68 entries.
  CHECK(std::count_if(ids.begin(), ids.end(), [](const auto& id) { return id[0] != 'O'; }) == 68);
}

TEST_CASE("mutants: all that can be planted are caught, named and explained", "[mutants]") {
  for (const uint64_t seed : {0, 31}) {  // the catalogue's own data, and others
    const MutantRun run =
        run_mutants(mutant_catalogue(), {}, seed == 0 ? std::nullopt : std::optional(seed));
    for (const MutantOutcome& outcome : run.outcomes) {
      if (!outcome.expressible()) continue;
      INFO(outcome.mutant.id << " seed " << seed);
      CHECK(outcome.killed());
      if (outcome.mutant.forward_right) CHECK(outcome.forward_held());
    }
    CHECK(run.false_alarms() == std::vector<std::string>{});
    CHECK(run.named() >= 0.95 * run.expressible());
    CHECK(run.cause_named_first() >= 0.9 * run.expressible());
    CHECK(run.holds());
  }
}

TEST_CASE("mutants: one that changes nothing survives, and the run does not hold", "[mutants]") {
  Mutant nothing = find("S1");
  for (Plant& plant : nothing.plants) plant.subject = TrainingSubject{};
  const MutantRun run = run_mutants({nothing}, {});
  CHECK_FALSE(run.outcomes[0].killed());
  CHECK_FALSE(run.holds());
  CHECK(tests::contains(mutants_to_terminal(run, false), "SURVIVED"));
  CHECK(tests::contains(mutants_to_html(run, {}), "survived"));
}

TEST_CASE("mutants: one that fires without its trigger is a false alarm", "[mutants]") {
  Mutant eager = find("A6");
  eager.innocent = {eager.plants[0]};
  const MutantRun run = run_mutants({eager}, {});
  CHECK(run.outcomes[0].killed());
  REQUIRE(run.false_alarms().size() == 1);
  CHECK(tests::contains(run.false_alarms()[0], "A6"));
  CHECK_FALSE(run.holds());
}

TEST_CASE("mutants: ranks whose results have other shapes are a failure, no error", "[mutants]") {
  WorldPool worlds(sim::WorldOptions{});
  const Mutant fewer_tokens = find("H6"), bypass = find("A4");
  REQUIRE(fewer_tokens.plants[0].case_id == bypass.plants[0].case_id);
  // Without communication nothing notices before the results are put together.
  const auto pair = both(fewer_tokens.plants[0].subject, bypass.plants[0].subject);
  REQUIRE(pair);
  const CaseResult result = check_plant({bypass.plants[0].case_id, *pair}, worlds);
  INFO(result.reason);
  CHECK(result.status == Status::kFail);
}

TEST_CASE("mutants: the matrix is written for programs and for people", "[mutants]") {
  Mutant named = find("A1");
  named.text = "<script>alert(1)</script>";
  const MutantRun run = run_mutants({named, find("F2")}, {});
  const auto json = nlohmann::json::parse(
      mutants_to_json(run, {"abc", "./shardproof mutants", "2026-01-01T00:00:00Z", 1, {}}));
  CHECK(json["format"] == "shardproof-mutants");
  REQUIRE(json["mutants"].size() == 2);
  const auto& first = json["mutants"][0];
  CHECK(first["id"] == "A1");
  CHECK(first["class"] == "M-STALEKV");
  CHECK(first["killed"] == true);
  CHECK(first["by"].front() == "GRAD");  // and the scale that gradients have in common
  CHECK(first["location"]["first_wrong"] == "q:grad");
  CHECK(first["hypothesis"]["class"] == "backward");
  CHECK(first["peers"].size() >= 8);
  CHECK(json["mutants"][1]["expressible"] == false);
  CHECK(json["mutants"][1]["reason"] != "");
  const std::string page = mutants_to_html(run, {});
  CHECK_FALSE(tests::contains(page, "<script>"));
  CHECK(tests::contains(page, "&lt;script&gt;"));
  CHECK(tests::contains(page, "not planted"));
}

}  // namespace
}  // namespace shardproof::verify
