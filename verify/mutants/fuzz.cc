#include "verify/mutants/fuzz.h"

#include <algorithm>
#include <chrono>

#include "base/error.h"
#include "verify/mutants/mutant_run.h"

namespace shardproof::verify {
namespace {

// `vanishing` gets the names of tensors that are zero in exact arithmetic (gradients through a
// softmax over one key): all that a run can have of them is rounding error, and their checks judge
// no more than its size.
CaseResult judge_plant(Plant plant, Worlds& worlds, std::set<std::string>& vanishing) {
  const Observer observe = [&](const Judged& tensor) {
    if (std::all_of(tensor.oracle.begin(), tensor.oracle.end(), [](double x) { return x == 0; })) {
      vanishing.insert(tensor.name);
    }
  };
  std::visit([&](auto& subject) { subject.observe = observe; }, plant.subject);
  return check_plant(plant, worlds);
}

std::string distance_text(const Distance& distance, const CaseResult& result) {
  std::string text = fmt::format("{} moves by {:.1e}", distance.name, distance.relative);
  for (const TensorResult& tensor : result.tensors) {
    if (tensor.name != distance.name) continue;
    text += fmt::format(" (error {:.1e}, limit {:.1e})", tensor.error, tensor.limit);
  }
  return text;
}

// A survivor: equivalent, if the bytes say so.
void compare_with_clean(const RandomMutant& mutant, const CaseResult& result,
                        const std::set<std::string>& vanishing, Worlds& worlds,
                        FuzzOutcome& outcome) {
  const BareRun clean = run_bare(without_mutant(mutant.plant), worlds);
  const BareRun mutated = run_bare(mutant.plant, worlds);
  if (same(clean, mutated, vanishing)) {
    outcome.fate = FuzzFate::kEquivalent;
    return;
  }
  const Distance distance = farthest(clean, mutated, vanishing);
  outcome.fate = FuzzFate::kSurvived;
  outcome.detail =
      distance.name.empty() ? "the same results by other calls" : distance_text(distance, result);
}

class FuzzCheck final : public Case {
 public:
  FuzzCheck(uint64_t seed, int64_t index, FuzzOutcome& outcome)
      : seed_(seed), index_(index), outcome_(outcome) {}
  std::string id() const override { return fmt::format("fuzz/{}/{}", seed_, index_); }
  CasePtr shrunk(const std::function<bool(const Case&)>&) const override { return nullptr; }
  CaseResult check(Worlds& worlds) const override {
    bool ended = false;
    const CaseResult ran = judged(id(), {}, [&](CaseResult&) {
      outcome_ = try_mutant(random_mutant(seed_, index_, worlds), worlds);
      ended = true;
    });
    outcome_.index = index_;
    // A correct run that throws must not take the other mutants with it.
    if (!ended) outcome_.fate = FuzzFate::kError, outcome_.detail = ran.reason;
    return {};  // what the runner would report is in the outcome
  }

 private:
  uint64_t seed_;
  int64_t index_;
  FuzzOutcome& outcome_;
};

}  // namespace

const char* to_string(FuzzFate fate) {
  switch (fate) {
    case FuzzFate::kKilled:
      return "killed";
    case FuzzFate::kEquivalent:
      return "equivalent";
    case FuzzFate::kError:
      return "error";
    default:
      return "survived";
  }
}

FuzzOutcome try_mutant(const RandomMutant& mutant, Worlds& worlds) {
  FuzzOutcome outcome;
  outcome.mutant = mutant;
  std::set<std::string> vanishing;
  const CaseResult result = judge_plant(mutant.plant, worlds, vanishing);
  switch (result.status) {
    case Status::kFail:
      outcome.fate = FuzzFate::kKilled;
      outcome.detail = first_finding(result);
      break;
    case Status::kPass:
      compare_with_clean(mutant, result, vanishing, worlds, outcome);
      break;
    default:  // a case that was skipped has proven nothing either
      outcome.fate = FuzzFate::kError;
      outcome.detail = result.reason;
  }
  return outcome;
}

int64_t FuzzRun::count(FuzzFate fate) const {
  return std::count_if(outcomes.begin(), outcomes.end(),
                       [&](const FuzzOutcome& outcome) { return outcome.fate == fate; });
}

bool FuzzRun::holds() const {
  return count(FuzzFate::kSurvived) == 0 && count(FuzzFate::kError) == 0;
}

FuzzRun run_fuzz(uint64_t seed, int64_t from, int64_t count, const RunOptions& options) {
  FuzzRun run;
  run.seed = seed;
  run.outcomes.resize(static_cast<size_t>(count));
  std::vector<CasePtr> cases;
  for (int64_t i = 0; i < count; ++i) {
    cases.push_back(
        std::make_shared<FuzzCheck>(seed, from + i, run.outcomes[static_cast<size_t>(i)]));
  }
  RunOptions quiet = options;
  quiet.shrink_failures = 0;
  const auto start = std::chrono::steady_clock::now();
  run_cases(cases, quiet);
  run.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return run;
}

}  // namespace shardproof::verify
