// Many cases at once: order, determinism, goldens, replay, and what is no result of the product.
#include "verify/runner.h"

#include "tests/catch.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <filesystem>
#include <mutex>
#include <set>

#include "tests/file_support.h"
#include "verify/attention/attention_check.h"
#include "verify/mutants/attention_mutants.h"
#include "verify/suites/attention_suite.h"

namespace shardproof::verify {
namespace {

using tests::contains;
using Goldens = std::map<std::string, AttentionGolden>;

std::vector<AttentionCase> few_cases(int64_t count = 24) {
  return random_attention_cases({}, 31, count);
}

TEST_CASE("runner: results come in the order of the cases", "[verify][runner]") {
  const auto cases = few_cases();
  for (const int lanes : {0, 1, 2, 5, 100}) {
    RunOptions options;
    options.lanes = lanes;
    std::mutex mutex;
    std::multiset<size_t> reported, totals;
    options.progress = [&](size_t done, size_t all) {
      const std::lock_guard lock(mutex);
      reported.insert(done);
      totals.insert(all);
    };
    const auto results = run_cases(attention_checks(cases), options);
    INFO(lanes << " lanes");
    REQUIRE(results.size() == cases.size());
    for (size_t i = 0; i < cases.size(); ++i) {
      INFO(results[i].id << ": " << results[i].first_wrong << results[i].reason);
      CHECK(results[i].id == cases[i].id());
      CHECK(results[i].status == Status::kPass);
      CHECK(contains(results[i].replay, "--case '" + cases[i].id() + "'"));
      CHECK(results[i].seconds > 0);
    }
    CHECK(reported.size() == cases.size());
    CHECK(reported.count(cases.size()) == 1);
    CHECK(totals.count(cases.size()) == cases.size());
  }
  CHECK(run_cases(attention_checks({}), {}).empty());
}

// ---- determinism

void check_same_numbers(const std::vector<CaseResult>& a, const std::vector<CaseResult>& b) {
  REQUIRE(a.size() == b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    INFO(a[i].id);
    REQUIRE(a[i].tensors.size() == b[i].tensors.size());
    for (size_t t = 0; t < a[i].tensors.size(); ++t) {
      const TensorResult &x = a[i].tensors[t], &y = b[i].tensors[t];
      INFO(x.name);
      CHECK(x.error == y.error);
      CHECK(x.reference_error == y.reference_error);
      CHECK(x.ratio == y.ratio);
      CHECK(x.cosine == y.cosine);
      CHECK(x.max_abs == y.max_abs);
      CHECK(x.max_abs_index == y.max_abs_index);
    }
  }
}

TEST_CASE("runner: schedules and lanes change no number", "[verify][runner]") {
  const auto cases = few_cases(40);
  RunOptions first;
  first.lanes = 1;
  const auto expected = run_cases(attention_checks(cases), first);
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    RunOptions options;
    options.schedule_seed = seed;
    options.lanes = 1 + static_cast<int>(seed % 2);
    INFO("schedule seed " << seed);
    check_same_numbers(expected, run_cases(attention_checks(cases), options));
  }
}

// ---- goldens

Goldens load_goldens() {
  Goldens goldens;
  for (const auto& folder : find_goldens(SHARDPROOF_SOURCE_DIR "/datasets/goldens")) {
    if (golden_kind(folder) != "attention") continue;
    AttentionGolden golden = load_attention_golden(folder);
    goldens.emplace(golden.name, std::move(golden));
  }
  return goldens;
}

std::vector<AttentionCase> cases_of(const Goldens& goldens) {
  std::vector<AttentionCase> cases;
  for (const auto& [name, golden] : goldens) {
    for (const AttentionCase& c : golden_cases(golden, {}, false)) cases.push_back(c);
  }
  return cases;
}

TEST_CASE("runner: the product passes the goldens", "[verify][runner]") {
  const Goldens goldens = load_goldens();
  CHECK(goldens.size() >= 4);
  for (const CaseResult& result : run_cases(attention_checks(cases_of(goldens), goldens), {})) {
    INFO(result.id << ": " << result.first_wrong << result.reason);
    CHECK(result.status == Status::kPass);
  }
}

// Both runs differ from such a golden by the same: it must not pass as an error that non-SP makes,
// too.
TEST_CASE("runner: a golden that is not what it was fails", "[verify][runner]") {
  Goldens goldens = load_goldens();
  CaseFilter filter;
  filter.sp = {2};
  filter.dtypes = {at::kDouble, at::kFloat};
  for (auto& [name, golden] : goldens) {
    golden.dv = golden.dv * 1.001;
    for (const CaseResult& result :
         run_cases(attention_checks(golden_cases(golden, filter, true), goldens), {})) {
      INFO(result.id);
      CHECK(result.status == Status::kFail);
      CHECK(result.first_wrong == "v:grad");
    }
  }
}

TEST_CASE("runner: a golden that is not there is bad input before any work", "[verify][runner]") {
  Goldens goldens = load_goldens();
  std::vector<AttentionCase> cases = few_cases(2);
  cases.push_back(cases_of(goldens).back());
  goldens.erase(cases.back().golden);
  RunOptions options;
  bool worked = false;
  options.progress = [&](size_t, size_t) { worked = true; };
  const std::string text =
      tests::error_text([&] { run_cases(attention_checks(cases, goldens), options); });
  CHECK(contains(text, cases.back().id()));
  CHECK(contains(text, "--golden"));
  CHECK(!worked);
}

// ---- failures

AttentionSubject planted(const char* id, const AttentionCase& c) {
  for (const AttentionMutant& mutant : attention_mutants()) {
    if (mutant.id != id) continue;
    const auto subject = mutant.plant(c);
    REQUIRE(subject);
    return *subject;
  }
  FAIL("no mutant " << id);
  return {};
}

std::string case_of_replay(const std::string& replay) {
  const std::string before = "./shardproof verify --case '";
  REQUIRE(replay.starts_with(before));
  const size_t end = replay.find('\'', before.size());
  REQUIRE(end != std::string::npos);
  return replay.substr(before.size(), end - before.size());
}

TEST_CASE("runner: the replay of a failure fails in the same way", "[verify][runner]") {
  struct Planted {
    const char* mutant;
    const char* case_id;
  };
  for (const Planted& fault :
       {Planted{"lse-ignored",
                "attention/joint/hybrid/ring2.ulysses2/fp64/b3.t9.i25.h6.d32.scattered#5"},
        Planted{"kv-swapped",
                "attention/joint/ulysses/dp2.ulysses3/bf16/b2.t9.i25.h6.ragged.headuneven#6"},
        Planted{"gradients-scaled", "attention/self/ring/ring4/fp32/b2.i21.tokenpad#7"},
        Planted{"heads-rotated", "attention/joint/ulysses/ulysses4/fp16/t8.i12#8"}}) {
    const AttentionCase c = AttentionCase::parse(fault.case_id);
    const AttentionSubject subject = planted(fault.mutant, c);
    for (const int shrinks : {0, 2}) {
      RunOptions options;
      options.shrink_failures = shrinks;
      const CaseResult result = run_cases(attention_checks({c}, {}, subject), options)[0];
      INFO(fault.mutant << ": " << result.replay);
      REQUIRE(result.status == Status::kFail);
      CHECK(result.id == c.id());  // the verdict is of the case that was asked for
      const AttentionCase replayed = AttentionCase::parse(case_of_replay(result.replay));
      CHECK((replayed.id() == c.id()) == (shrinks == 0));
      CHECK(replayed.tokens() * replayed.batch <= c.tokens() * c.batch);
      WorldPool worlds(sim::WorldOptions{});
      const CaseResult again = check_attention(replayed, subject, worlds);
      CHECK(again.status == Status::kFail);
      CHECK(again.first_wrong == result.first_wrong);
      // It is the fault that fails, not the case.
      CHECK(check_attention(replayed, {}, worlds).status == Status::kPass);
    }
  }
}

TEST_CASE("runner: only so many failures are shrunk", "[verify][runner]") {
  const AttentionCase c = AttentionCase::parse("attention/self/ulysses/ulysses2/fp64/b2.i24.h4#1");
  std::vector<AttentionCase> cases(4, c);
  for (size_t i = 0; i < cases.size(); ++i) cases[i].seed = i;
  RunOptions options;
  options.shrink_failures = 2;
  const auto results = run_cases(attention_checks(cases, {}, planted("kv-swapped", c)), options);
  for (size_t i = 0; i < cases.size(); ++i) {
    CHECK(results[i].status == Status::kFail);
    CHECK((case_of_replay(results[i].replay) == cases[i].id()) == (i >= 2));
  }
}

TEST_CASE("runner: the replay of a golden names its folder", "[verify][runner]") {
  const Goldens goldens = load_goldens();
  const auto results = run_cases(attention_checks({cases_of(goldens)[0]}, goldens), {});
  CHECK(contains(results[0].replay, "--case '" + results[0].id + "'"));
  CHECK(contains(
      results[0].replay,
      "--golden '" + std::filesystem::proximate(goldens.begin()->second.folder).string() + "'"));
}

TEST_CASE("runner: worlds are used again after a failure", "[verify][runner]") {
  at::set_num_threads(1);
  const AttentionCase c = AttentionCase::parse("attention/self/hybrid/ring2.ulysses2/fp64/default");
  WorldPool worlds(sim::WorldOptions{});
  for (const char* id : {"wait-omitted", "stale-kv", "dq-zero"}) {
    CHECK(check_attention(c, planted(id, c), worlds).status == Status::kFail);
    CHECK(check_attention(c, {}, worlds).status == Status::kPass);
  }
  AttentionSubject killed;
  killed.faults.push_back({.kind = sim::FaultKind::kKill, .tag = "out.head_to_seq", .rank = 2});
  const CaseResult dead = check_attention(c, killed, worlds);
  CHECK(dead.status == Status::kFail);
  CHECK(dead.tensors.empty());
  CHECK(check_attention(c, {}, worlds).status == Status::kPass);
}

// ---- what is no result of the product

TEST_CASE("runner: an impossible combination is a skip with its reason", "[verify][runner]") {
  struct Impossible {
    const char* id;
    const char* reason;
  };
  for (const Impossible& i :
       {Impossible{"attention/self/ulysses/ulysses2/fp32/h3", "3 heads cannot be split evenly"},
        Impossible{"attention/self/ulysses/ulysses4/fp32/h2.headuneven", "without a head"},
        Impossible{"attention/self/ring/ring2/fp32/h4.kv3", "4 query heads over 3 KV heads"},
        Impossible{"attention/self/ring/ring2/fp32/h4.kv0", "0 KV heads"},
        Impossible{"attention/self/ring/ring2/fp32/@cudnn", "runs on cuda"},
        Impossible{"attention/self/ring/ring2/fp32/@flash9", "no attention backend 'flash9'"}}) {
    const auto results = run_cases(attention_checks({AttentionCase::parse(i.id)}), {});
    INFO(i.id << ": " << results[0].reason);
    CHECK(results[0].status == Status::kSkip);
    CHECK(contains(results[0].reason, i.reason));
  }
}

// A case that can be built and that the product refuses all the same is not to be passed over.
TEST_CASE("runner: refused inputs are no skip", "[verify][runner]") {
  const AttentionCase c = AttentionCase::parse("attention/self/ulysses/ulysses2/fp32/default");
  AttentionSubject subject;
  subject.edit_plan = [](plan::AttentionPlan& p) { ++p.streams[0].local_rows[1]; };
  const CaseResult result = run_cases(attention_checks({c}, {}, subject), {})[0];
  INFO(result.reason);
  CHECK(result.status == Status::kError);
  CHECK(contains(result.reason, "expected Float [2, 13, 4, 16]"));
}

}  // namespace
}  // namespace shardproof::verify
