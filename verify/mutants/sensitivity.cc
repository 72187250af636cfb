#include "verify/mutants/sensitivity.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <deque>

#include "verify/attention/attention_check.h"
#include "verify/dtype.h"
#include "verify/models/model_check.h"
#include "verify/mutants/binomial.h"
#include "verify/mutants/mutant_run.h"
#include "verify/mutants/planting.h"
#include "verify/suites/draw.h"
#include "verify/suites/model_suite.h"

namespace shardproof::verify {
namespace {

constexpr int kPointsPerDecade = 4, kSmallestDecade = -16;

// Of one judge: it accepts the correct case, and the index of the first size that it catches.
struct FirstCaught {
  bool accepts = false;
  size_t first = 0;
};
struct CasePower {
  Scope scope;
  bool bitwise = false;
  FirstCaught ours;
  std::map<std::string, FirstCaught> peers;
};

// Names of published tests that look at something in the line.
std::vector<std::string> concerned_peers(const StoredCase& stored, const ErrorLine& line) {
  PeerTests tests(stored.level, stored.dtype, stored.ranks);
  for (const Change& change : line) {
    const StoredTensor& tensor = stored.tensors[change.tensor];
    tests.add(tensor.name(), tensor.result(), tensor.reference(), tensor.oracle());
  }
  std::vector<std::string> names;
  for (const PeerVerdict& verdict : tests.judge()) names.push_back(verdict.test);
  return names;
}

bool accepts(const std::vector<PeerVerdict>& verdicts, const std::string& test) {
  return std::any_of(verdicts.begin(), verdicts.end(),
                     [&](const PeerVerdict& v) { return v.test == test && v.accepts; });
}

CasePower power_in(const StoredCase& stored, const ErrorLine& line, Scope scope) {
  const std::vector<double> sizes = error_sizes();
  CasePower power{scope, stored.is_bitwise(), {}, {}};
  power.ours.accepts = stored.result.status == Status::kPass;
  power.ours.first = first_caught(sizes, [&](double e) { return stored.caught(line, e); });
  if (stored.only_bits) return power;  // published tests are asked in the other case
  // All tests are asked together, at most once for a size.
  std::map<double, std::vector<PeerVerdict>> asked;
  const auto verdicts = [&](double e) -> const std::vector<PeerVerdict>& {
    const auto [it, is_new] = asked.try_emplace(e);
    if (is_new) it->second = stored.peers(line, e);
    return it->second;
  };
  for (const std::string& test : concerned_peers(stored, line)) {
    FirstCaught& peer = power.peers[test];
    peer.accepts = accepts(verdicts(0), test);
    if (!peer.accepts) continue;
    peer.first = first_caught(sizes, [&](double e) { return !accepts(verdicts(e), test); });
  }
  return power;
}

StoredCase stored(const AttentionCase& c, Scope, Worlds& worlds) { return store_case(c, worlds); }
StoredCase stored(const ModelCase& c, Scope, Worlds& worlds) { return store_case(c, worlds); }
StoredCase stored(const TrainingCase& c, Scope scope, Worlds& worlds) {
  return store_case(
      c, worlds,
      scope == Scope::kMatchedGradients ? TrainingReference::kMatched : TrainingReference::kBudget);
}

std::optional<ErrorLine> line(const AttentionCase& c, const StoredCase& stored, Scope scope) {
  return error_line(c, stored, scope);
}
template <class AnyCase>
std::optional<ErrorLine> line(const AnyCase&, const StoredCase& stored, Scope) {
  return parameter_gradients(stored);
}

// Runs a case and measures it at once, so that its numbers need not be kept.
template <class AnyCase>
class PowerCheck final : public Case {
 public:
  // `scopes`: at least one.
  PowerCheck(AnyCase c, std::vector<Scope> scopes, std::vector<CasePower>* result)
      : case_(std::move(c)), scopes_(std::move(scopes)), result_(result) {}
  std::string id() const override { return case_.id(); }
  CasePtr shrunk(const std::function<bool(const Case&)>&) const override { return nullptr; }
  CaseResult check(Worlds& worlds) const override {
    const StoredCase kept = stored(case_, scopes_.front(), worlds);
    if (!kept.ran()) return kept.result;
    for (const Scope scope : scopes_) {
      const auto error = line(case_, kept, scope);
      if (error) result_->push_back(power_in(kept, *error, scope));
    }
    return kept.result;
  }

 private:
  AnyCase case_;
  std::vector<Scope> scopes_;
  std::vector<CasePower>* result_;
};

// As the catalogue plants mutants, over several meshes and models.
ModelCase model_case(c10::ScalarType dtype, uint64_t seed) {
  static constexpr std::array kMeshes = {"dp1.ring1.ulysses2", "dp1.ring2.ulysses1",
                                         "dp1.ring2.ulysses2"};
  static constexpr std::array kModels = {"qwenimage", "flux", "sd3", "wan"};
  ModelSpot spot{kMeshes[seed % kMeshes.size()], kModels[seed % kModels.size()]};
  ModelCase c = ModelCase::parse(case_id(spot, dtype));
  c.seed = seed;
  return c;
}

TrainingCase training_case(c10::ScalarType dtype, uint64_t seed) {
  static constexpr std::array kMeshes = {"dp2.ring1.ulysses2.fsdp4", "dp1.ring1.ulysses4.fsdp4",
                                         "dp1.ring2.ulysses1.fsdp2"};
  static constexpr std::array kModels = {"qwenimage", "flux"};
  TrainingSpot spot{kMeshes[seed % kMeshes.size()]};
  spot.subject = kModels[seed % kModels.size()];
  TrainingCase c = TrainingCase::parse(plant(spot, TrainingSubject{}).case_id);
  c.model.dtype = dtype;
  c.model.seed = seed;
  return c;
}

// Everything that is run, with a place for what is measured in each case.
struct Program {
  std::vector<CasePtr> cases;
  std::vector<c10::ScalarType> dtypes;  // of each case
  std::vector<std::string> kinds;
  std::deque<std::vector<CasePower>> powers;

  template <class AnyCase>
  void measure(const AnyCase& c, c10::ScalarType dtype, const char* kind,
               const std::vector<Scope>& scopes) {
    powers.emplace_back();
    cases.push_back(std::make_shared<PowerCheck<AnyCase>>(c, scopes, &powers.back()));
    dtypes.push_back(dtype);
    kinds.emplace_back(kind);
  }
  void run_only(std::vector<CasePtr> more, const char* kind) {
    for (CasePtr& one : more) cases.push_back(std::move(one)), kinds.emplace_back(kind);
  }
};

Program write_program(const PowerOptions& o) {
  Program program;
  std::vector<Scope> of_attention;
  for (const Scope scope : o.scopes) {
    if (scope < Scope::kModelGradients) of_attention.push_back(scope);
  }
  const auto measure = [&](Scope scope, const auto& c, c10::ScalarType dtype, const char* kind) {
    if (std::count(o.scopes.begin(), o.scopes.end(), scope) > 0) {
      program.measure(c, dtype, kind, {scope});
    }
  };
  for (const c10::ScalarType dtype : o.dtypes.empty() ? all_dtypes() : o.dtypes) {
    CaseFilter filter;
    filter.dtypes = {dtype};
    const int64_t count = of_attention.empty() ? 0 : o.seeds;
    for (const AttentionCase& c : random_attention_cases(filter, o.seed, count)) {
      program.measure(c, dtype, "attention", of_attention);
    }
    for (int64_t i = 0; i < o.seeds; ++i) {
      const uint64_t seed = case_seed(o.seed, static_cast<uint64_t>(i));
      measure(Scope::kModelGradients, model_case(dtype, seed), dtype, "models");
      measure(Scope::kTrainingGradients, training_case(dtype, seed), dtype, "training");
      measure(Scope::kMatchedGradients, training_case(dtype, seed), dtype, "training --matched");
    }
  }
  // Other seeds than above: each case counts once.
  const uint64_t seed = o.seed + 1;
  if (o.correct > 0) {
    program.run_only(attention_checks(random_attention_cases({}, seed, o.correct)), "attention");
    program.run_only(model_checks(random_model_cases({}, seed, o.correct / 20)), "models");
  }
  return program;
}

void count(const FirstCaught& found, size_t sizes, PowerCurve& curve) {
  curve.caught.resize(sizes);
  if (!found.accepts) {
    ++curve.excluded;
    return;
  }
  ++curve.cases;
  for (size_t i = found.first; i < sizes; ++i) ++curve.caught[i];
}

ScopePower& scope_power(PowerRun& run, c10::ScalarType dtype, Scope scope) {
  for (ScopePower& known : run.scopes) {
    if (known.dtype == dtype && known.scope == scope) return known;
  }
  ScopePower fresh;
  fresh.dtype = dtype;
  fresh.scope = scope;
  return run.scopes.emplace_back(std::move(fresh));
}

std::vector<AlarmCount> count_alarms(const Program& program,
                                     const std::vector<CaseResult>& results) {
  std::vector<AlarmCount> counts;
  for (const char* kind : {"attention", "models", "training", "training --matched"}) {
    AlarmCount count{kind, 0, {}};
    for (size_t i = 0; i < results.size(); ++i) {
      if (program.kinds[i] != kind || results[i].status == Status::kSkip) continue;
      ++count.cases;
      if (results[i].status == Status::kPass) continue;
      count.alarms.push_back(results[i].id + ": " + first_finding(results[i]) + results[i].reason);
    }
    if (count.cases > 0) counts.push_back(std::move(count));
  }
  return counts;
}

}  // namespace

std::vector<double> error_sizes() {
  std::vector<double> sizes;
  for (int i = kSmallestDecade * kPointsPerDecade; i <= 0; ++i) {
    sizes.push_back(std::pow(10.0, static_cast<double>(i) / kPointsPerDecade));
  }
  return sizes;
}

size_t first_caught(const std::vector<double>& sizes, const std::function<bool(double)>& caught) {
  const auto found =
      std::partition_point(sizes.begin(), sizes.end(), [&](double size) { return !caught(size); });
  return static_cast<size_t>(found - sizes.begin());
}

std::optional<double> PowerCurve::smallest(double power) const {
  const std::vector<double> sizes = error_sizes();
  if (cases == 0) return std::nullopt;
  // Curves rise: the first such size is the one from which on all are.
  for (size_t i = 0; i < caught.size(); ++i) {
    if (caught[i] >= power * cases) return sizes[i];
  }
  return std::nullopt;
}

double AlarmCount::upper() const {
  return binomial_upper(static_cast<int64_t>(alarms.size()), cases);
}

bool PowerRun::holds() const {
  return std::all_of(alarms.begin(), alarms.end(),
                     [](const AlarmCount& count) { return count.alarms.empty(); });
}

PowerRun measure_power(const PowerOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  const Program program = write_program(options);
  RunOptions quiet = options.run;
  quiet.shrink_failures = 0;
  const std::vector<CaseResult> results = run_cases(program.cases, quiet);
  PowerRun run;
  run.sizes = error_sizes();
  run.alarms = count_alarms(program, results);
  for (size_t i = 0; i < program.powers.size(); ++i) {
    for (const CasePower& found : program.powers[i]) {
      ScopePower& scope = scope_power(run, program.dtypes[i], found.scope);
      scope.bitwise += found.bitwise ? 1 : 0;
      count(found.ours, run.sizes.size(), scope.ours);
      for (const auto& [test, peer] : found.peers) count(peer, run.sizes.size(), scope.peers[test]);
    }
  }
  run.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return run;
}

}  // namespace shardproof::verify
