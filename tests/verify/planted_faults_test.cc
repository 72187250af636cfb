// Every planted attention fault is caught by the default suite, in every dtype, at sp = 2 and 8,
// and the verdict names the right tensor.
#include "tests/catch.h"
#include "verify/attention/attention_check.h"
#include "verify/dtype.h"
#include "verify/mutants/attention_mutants.h"
#include "verify/runner.h"
#include "verify/suites/attention_suite.h"

#include <algorithm>
#include <cstdio>

namespace shardproof::verify {
namespace {

struct Outcome {
  int expressible = 0;
  int caught = 0;
  int named = 0;                          // the first wrong tensor is an expected one
  std::vector<std::string> wrong_tensor;  // caught, but another tensor is named
};

Outcome run_suite_with(const AttentionMutant& mutant, int sp, c10::ScalarType dtype) {
  CaseFilter filter;
  filter.sp = {sp};
  filter.dtypes = {dtype};
  Outcome outcome;
  WorldPool worlds(sim::WorldOptions{});
  for (const AttentionCase& c : attention_suite(filter, 1, /*quick=*/false)) {
    const auto subject = mutant.plant(c);
    if (!subject) continue;
    ++outcome.expressible;
    const CaseResult result = check_attention(c, *subject, worlds);
    if (result.status == Status::kSkip) {
      --outcome.expressible;
      continue;
    }
    if (result.status != Status::kFail) continue;
    ++outcome.caught;
    // A damaged plan can fail its audit although this case's numbers do not depend on the damage.
    if (result.first_wrong.empty()) continue;
    const bool expected = std::find(mutant.expected.begin(), mutant.expected.end(),
                                    result.first_wrong) != mutant.expected.end();
    if (expected) {
      ++outcome.named;
    } else {
      outcome.wrong_tensor.push_back(result.id + ": " + result.first_wrong);
    }
  }
  return outcome;
}

TEST_CASE("the default suite catches every planted attention fault", "[mutants]") {
  for (const AttentionMutant& mutant : attention_mutants()) {
    for (int sp : {2, 8}) {
      for (c10::ScalarType dtype : all_dtypes()) {
        const Outcome outcome = run_suite_with(mutant, sp, dtype);
        INFO(mutant.id << " sp=" << sp << " " << dtype_name(dtype) << ": caught in "
                       << outcome.caught << " of " << outcome.expressible << " cases");
        std::printf("%-20s sp=%d %s caught in %d of %d cases\n", mutant.id.c_str(), sp,
                    dtype_name(dtype).c_str(), outcome.caught, outcome.expressible);
        CHECK(outcome.expressible > 0);
        CHECK(outcome.caught > 0);
        CHECK(outcome.named > 0);
        CHECK(outcome.wrong_tensor == std::vector<std::string>{});
      }
    }
  }
}

TEST_CASE("without a fault the same cases pass", "[mutants]") {
  CaseFilter filter;
  filter.sp = {2, 8};
  for (const CaseResult& result :
       run_cases(attention_checks(attention_suite(filter, 1, false)), {})) {
    INFO(result.id << ": " << result.first_wrong << result.reason);
    CHECK(result.status == Status::kPass);
  }
}

}  // namespace
}  // namespace shardproof::verify
