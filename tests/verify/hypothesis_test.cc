// What the numbers of a failed case suggest: made-up numbers, and faults of known cause.
#include "verify/hypothesis.h"

#include "tests/catch.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <limits>

#include "tests/file_support.h"
#include "verify/attention/attention_check.h"
#include "verify/mutants/attention_mutants.h"

namespace shardproof::verify {
namespace {

using tests::contains;

constexpr double kInf = std::numeric_limits<double>::infinity();

TensorResult wrong_tensor(const char* name, double error, double ratio) {
  TensorResult t;
  t.name = name;
  t.status = Status::kFail;
  t.error = error, t.reference_error = 1e-3, t.limit = 2e-3;
  t.ratio = ratio, t.cosine = 0.9;
  return t;
}

CaseResult with_tensor(const TensorResult& t) {
  CaseResult result;
  TensorResult right = t;
  right.name = "before", right.status = Status::kPass;
  result.tensors = {right, t};
  return result;
}

constexpr comm::MeshShape kMesh{3, 2, 4};  // sp 8, dp 3

TEST_CASE("hypothesis: a factor is named after the mesh", "[verify][hypothesis]") {
  struct Factor {
    double ratio;
    const char* name;
  };
  for (const Factor& f :
       {Factor{8, "(sp)"}, Factor{1.0 / 8, "(1/sp)"}, Factor{64, "(sp^2)"},
        Factor{1.0 / 64, "(1/sp^2)"}, Factor{3, "(dp)"}, Factor{1.0 / 3, "(1/dp)"},
        Factor{24, "(dp*sp)"}, Factor{1.0 / 24, "(1/(dp*sp))"}, Factor{0.5, "(1/ring)"},
        Factor{0.25, "(1/ulysses)"}}) {
    const auto found =
        suggest(with_tensor(wrong_tensor("q:grad", std::abs(f.ratio - 1), f.ratio)), kMesh);
    REQUIRE(found.size() == 1);
    INFO(found[0].text);
    CHECK(found[0].kind == "scale");
    CHECK(contains(found[0].text, f.name));
    CHECK(contains(found[0].evidence, "q:grad"));
  }
  const auto odd = suggest(with_tensor(wrong_tensor("q:grad", 0.1, 0.9)), kMesh);
  REQUIRE(odd.size() == 1);
  CHECK(odd[0].kind == "scale");
  CHECK(contains(odd[0].text, "0.9000 times"));
  CHECK(!contains(odd[0].text, "("));
  // Factors of 1 mean nothing: on one rank sp, dp and ring are all 1.
  const auto alone = suggest(with_tensor(wrong_tensor("q:grad", 0.011, 1.0109)), {1, 1, 1});
  REQUIRE(alone.size() == 1);
  CHECK(!contains(alone[0].text, "("));
}

TEST_CASE("hypothesis: the kind follows the first wrong tensor", "[verify][hypothesis]") {
  const auto kind = [](const TensorResult& t) {
    const auto found = suggest(with_tensor(t), kMesh);
    REQUIRE(found.size() == 1);
    CHECK(contains(found[0].evidence, t.name));
    return found[0].kind;
  };
  CHECK(kind(wrong_tensor("output", kInf, kInf)) == "unwritten");
  CHECK(kind(wrong_tensor("output", 3e-3, 1.0)) == "precision");
  CHECK(kind(wrong_tensor("q:grad", 3e-3, 1.0)) == "precision");
  CHECK(kind(wrong_tensor("output", 0.7, 0.8)) == "layout");
  CHECK(kind(wrong_tensor("lse", 0.7, 0.8)) == "lse");
  CHECK(kind(wrong_tensor("k:grad", 0.7, 0.8)) == "backward");

  CaseResult several;
  several.tensors = {wrong_tensor("lse", 0.7, 0.8), wrong_tensor("q:grad", 0.9, 0.1)};
  REQUIRE(suggest(several, kMesh).size() == 1);
  CHECK(suggest(several, kMesh)[0].kind == "lse");
}

TEST_CASE("hypothesis: failed checks come first", "[verify][hypothesis]") {
  CaseResult result = with_tensor(wrong_tensor("output", kInf, kInf));
  result.checks = {{"coverage", Status::kFail, "token 3"},
                   {"race", Status::kFail, "both tags"},
                   {"deadlock", Status::kPass, ""},
                   {"trace", Status::kFail, "one call"}};
  const auto found = suggest(result, kMesh);
  REQUIRE(found.size() == 3);
  CHECK(found[0].kind == "race");
  CHECK(found[0].evidence == "both tags");
  CHECK(found[1].kind == "ownership");
  CHECK(found[1].evidence == "token 3");
  CHECK(found[2].kind == "unwritten");

  CaseResult stuck;
  stuck.checks = {{"deadlock", Status::kFail, "who waits"}};
  REQUIRE(suggest(stuck, kMesh).size() == 1);
  CHECK(suggest(stuck, kMesh)[0].kind == "collective-order");
}

TEST_CASE("hypothesis: nothing wrong suggests nothing", "[verify][hypothesis]") {
  CHECK(suggest({}, kMesh).empty());
  TensorResult right = wrong_tensor("output", 0.5, 0.5);
  right.status = Status::kPass;
  CHECK(suggest(with_tensor(right), kMesh).empty());
}

// ---- from a planted fault to a hypothesis

std::string kind_of_mutant(const char* id, const char* case_id) {
  at::set_num_threads(1);
  const AttentionCase c = AttentionCase::parse(case_id);
  for (const AttentionMutant& mutant : attention_mutants()) {
    if (mutant.id != id) continue;
    const auto subject = mutant.plant(c);
    REQUIRE(subject);
    WorldPool worlds(sim::WorldOptions{});
    const CaseResult result = check_attention(c, *subject, worlds);
    CHECK(result.status == Status::kFail);
    REQUIRE(!result.hypotheses.empty());
    return result.hypotheses.back().kind;
  }
  FAIL("no mutant " << id);
  return {};
}

TEST_CASE("hypothesis: planted faults", "[verify][hypothesis]") {
  CHECK(kind_of_mutant("gradients-scaled", "attention/self/ring/ring2/fp64/default") == "scale");
  CHECK(kind_of_mutant("kv-swapped", "attention/self/ring/ring2/fp64/default") == "backward");
  CHECK(kind_of_mutant("heads-rotated", "attention/self/ulysses/ulysses2/fp64/default") ==
        "layout");
  CHECK(kind_of_mutant("lse-ignored", "attention/self/ring/ring4/fp64/default") == "layout");
  CHECK(kind_of_mutant("wait-omitted", "attention/self/ulysses/ulysses2/fp64/default") ==
        "unwritten");  // behind the wait that the trace misses
  CHECK(kind_of_mutant("merge-low-precision", "attention/self/ring/ring4/bf16/b2.i48.d32") ==
        "precision");
}

}  // namespace
}  // namespace shardproof::verify
