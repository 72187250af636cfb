// Ids of training cases, the suite's coverage, and that it holds.
#include "verify/suites/training_suite.h"

#include "tests/catch.h"

#include <set>
#include "base/error.h"

#include "tests/file_support.h"
#include "verify/suites/covering_array.h"
#include "verify/training/training_check.h"

namespace shardproof::verify {
namespace {

using tests::contains;
using tests::error_text;

TEST_CASE("covering array: every pair that is allowed", "[training]") {
  const std::vector<int> levels = {4, 3, 2, 2, 3};
  const auto allowed = [](const Combination& c) { return c[0] != 2 || c[1] == 1; };
  const auto rows = covering_array(levels, 2, allowed);
  CHECK(rows.size() < 24);  // all: 144
  std::set<std::vector<int>> seen;
  for (const Combination& row : rows) {
    CHECK(allowed(row));
    for (int a = 0; a < 5; ++a) {
      for (int b = a + 1; b < 5; ++b) {
        seen.insert({a, row[static_cast<size_t>(a)], b, row[static_cast<size_t>(b)]});
      }
    }
  }
  size_t pairs = 0;
  for (size_t a = 0; a < 5; ++a) {
    for (size_t b = a + 1; b < 5; ++b) pairs += static_cast<size_t>(levels[a] * levels[b]);
  }
  CHECK(seen.size() == pairs - 2);  // 2 with 0, 2 with 2 of the first two factors
  CHECK(covering_array(levels, 1, allowed).size() >= 4);
  CHECK(covering_array(levels, 2, allowed) == rows);
}

TEST_CASE("training suite: ids are read back", "[training]") {
  std::set<std::string> ids;
  for (const TrainingCase& c : training_suite({}, 1, false)) {
    CHECK(TrainingCase::parse(c.id()).id() == c.id());
    ids.insert(c.id());
  }
  CHECK(ids.size() == training_suite({}, 1, false).size());
  const auto refused = [](const char* id, const char* why) {
    INFO(id);
    CHECK(contains(error_text([&] { TrainingCase::parse(id); }), why));
  };
  refused("training/flux/local/dp2.ring1.ulysses1.fsdp3/fp64/s2", "3 shards do not divide");
  refused("training/flux/local/dp2.ring1.ulysses1.fsdpx/fp64/s2", "expected fsdp and a positive");
  refused("training/flux/local/dp2.ring1.ulysses1/fp64/s0", "expected 1 to 1000 steps");
  refused("training/flux/ulysses/dp1.ring1.ulysses2/fp64/perrank.A", "under convention C only");
  refused("training/flux/local/dp2.ring1.ulysses1/fp64/s2.fast", "unknown word 'fast'");
  refused("training/flux/fp64", "expected training/<subject>");
}

TEST_CASE("training suite: the quick one holds on virtual ranks", "[training]") {
  WorldPool worlds(sim::WorldOptions{});
  for (const CasePtr& c : training_checks(training_suite({}, 5, true))) {
    const CaseResult result = c->check(worlds);
    INFO(result.id << " " << result.reason << " " << result.first_wrong);
    CHECK(result.status == Status::kPass);
  }
}

TEST_CASE("training suite: features that are named are in it", "[training]") {
  for (const bool quick : {true, false}) {
    std::string all;
    for (const TrainingCase& c : training_suite({}, 1, quick)) all += fmt::format("{} ", c.id());
    for (const char* word :
         {".acc3",       ".acc4", ".defer",    ".clip",   ".sgd",     ".stop", ".noreshard",
          ".noprefetch", ".repl", ".offload",  ".masked", ".perrank", ".lora", ".recompute",
          ".drop",       ".cfg",  ".tokenpad", "fsdp8",   "fp32",     "bf16",  "fp16"}) {
      INFO(word);
      CHECK(contains(all, word));
    }
  }
}

}  // namespace
}  // namespace shardproof::verify
