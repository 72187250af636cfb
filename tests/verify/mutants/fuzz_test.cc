#include "verify/mutants/fuzz.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "tests/catch.h"
#include "verify/mutants/fuzz_report.h"
#include "verify/mutants/planting.h"

namespace shardproof::verify {
namespace {

using sim::FaultKind;

FuzzOutcome try_fault(const AttentionSpot& spot, const sim::Fault& fault) {
  WorldPool worlds({});
  const Plant one = plant(spot, with_faults<AttentionSubject>({fault}));
  return try_mutant({"by hand", "", one}, worlds);
}

const AttentionSpot kRing{"dp1.ring2.ulysses1"}, kUlysses{"dp1.ring1.ulysses2"};

TEST_CASE("a seed and a number always give the same mutant") {
  WorldPool first({}), second({});
  std::vector<std::string> forward, backward;
  const auto text = [](const RandomMutant& mutant) {
    return mutant.plant.case_id + " " + mutant.operators + " " + mutant.text;
  };
  for (int i = 0; i < 12; ++i) forward.push_back(text(random_mutant(5, i, first)));
  for (int i = 11; i >= 0; --i) backward.push_back(text(random_mutant(5, i, second)));
  std::reverse(backward.begin(), backward.end());
  CHECK(forward == backward);
  CHECK(text(random_mutant(6, 0, first)) != forward[0]);
}

TEST_CASE("no random mutant survives") {
  for (const uint64_t seed : {11, 12, 13}) {
    const FuzzRun run = run_fuzz(seed, 0, 40, {});
    INFO(fuzz_to_terminal(run, false));
    CHECK(run.holds());
    CHECK(run.count(FuzzFate::kKilled) > 20);
  }
}

TEST_CASE("what changes nothing is equivalent") {
  const auto fate = [](const AttentionSpot& spot, const sim::Fault& fault) {
    return try_fault(spot, fault).fate;
  };
  CHECK(fate(kRing, {.kind = FaultKind::kScale, .tag = "kv.rotate"}) == FuzzFate::kEquivalent);
  CHECK(fate(kUlysses, {.kind = FaultKind::kRotatePeers, .tag = "out.head_to_seq", .shift = 2}) ==
        FuzzFate::kEquivalent);
}

TEST_CASE("a bit that changes below every limit makes a survivor, not an equivalent") {
  const FuzzOutcome outcome =
      try_fault(kRing, {.kind = FaultKind::kScale, .tag = "kv.rotate", .factor = 1 + 0x1p-52});
  CHECK(outcome.fate == FuzzFate::kSurvived);
  CHECK(outcome.detail.find("moves by") != std::string::npos);
}

TEST_CASE("what is rounding error of zero does not tell two runs apart") {
  const AttentionSpot one_key{"dp1.ring1.ulysses2", "b2.t8.i25.h4.d16.onekey"};
  // The exchange of dq, which one key leaves zero but for rounding.
  const sim::Fault fault{.kind = FaultKind::kDrop, .tag = "qkv.seq_to_head'", .occurrence = 0};
  CHECK(try_fault(one_key, fault).fate == FuzzFate::kEquivalent);
  CHECK(try_fault({"dp1.ring1.ulysses2", "b2.t8.i25.h4.d16"}, fault).fate == FuzzFate::kKilled);
}

TEST_CASE("a plan by which ranks cannot work is a finding, not an error") {
  AttentionSubject subject;
  subject.edit_plan = [](plan::AttentionPlan& plan) { ++plan.streams[0].shards[1].end; };
  WorldPool worlds({});
  const FuzzOutcome outcome = try_mutant({"by hand", "", plant(kRing, subject)}, worlds);
  CHECK(outcome.fate == FuzzFate::kKilled);
  CHECK(outcome.detail == "coverage");
}

// Where no run ends.
struct BrokenWorlds final : Worlds {
  RankWorld& get(int) override { internal_error("no world today"); }
  at::Device device() const override { return at::kCPU; }
};

TEST_CASE("a run that throws is an outcome and leaves the others alone") {
  BrokenWorlds worlds;
  RunOptions options;
  options.worlds = &worlds;
  const FuzzRun run = run_fuzz(1, 0, 3, options);
  CHECK(run.count(FuzzFate::kError) == 3);
  CHECK_FALSE(run.holds());
  for (const FuzzOutcome& outcome : run.outcomes) {
    CHECK(outcome.detail.find("no world today") != std::string::npos);
  }
}

TEST_CASE("the report names survivors and how to repeat them") {
  FuzzRun run;
  run.seed = 9;
  FuzzOutcome outcome =
      try_fault(kRing, {.kind = FaultKind::kScale, .tag = "kv.rotate", .factor = 1 + 0x1p-52});
  outcome.index = 17;
  run.outcomes = {outcome};
  CHECK_FALSE(run.holds());
  const std::string replay = "./shardproof mutants --fuzz 1 --seed 9 --from 17";
  CHECK(fuzz_to_terminal(run, false).find(replay) != std::string::npos);
  const auto json = nlohmann::json::parse(fuzz_to_json(run, {}));
  CHECK(json["counts"]["survived"] == 1);
  CHECK(json["operators"]["by hand"]["tried"] == 1);
  CHECK(json["mutants"][0]["replay"] == replay);
}

}  // namespace
}  // namespace shardproof::verify
