#include "verify/mutants/mutant_run.h"

#include <fnmatch.h>

#include <algorithm>
#include <chrono>

#include "verify/attention/attention_check.h"
#include "verify/models/model_check.h"
#include "verify/peers/peer_tests.h"
#include "verify/training/training_check.h"

namespace shardproof::verify {
namespace {

// The published tests that a plant's case is asked about.
struct AskedPeers {
  const std::string& id;
  PeerTests operator()(const AttentionSubject&) const {
    const AttentionCase c = AttentionCase::parse(id);
    return {PeerLevel::kAttention, c.dtype, c.mesh.world()};
  }
  PeerTests operator()(const ModelSubject&) const {
    const ModelCase c = ModelCase::parse(id);
    return {PeerLevel::kModel, c.dtype, c.mesh.world()};
  }
  PeerTests operator()(const TrainingSubject&) const {
    const TrainingCase c = TrainingCase::parse(id);
    return {PeerLevel::kModel, c.model.dtype, c.model.mesh.world()};
  }
};

struct CheckOf {
  const std::string& id;
  Worlds& worlds;
  CaseResult operator()(const AttentionSubject& subject) const {
    return check_attention(AttentionCase::parse(id), subject, worlds);
  }
  CaseResult operator()(const ModelSubject& subject) const {
    return check_model(ModelCase::parse(id), subject, worlds);
  }
  CaseResult operator()(const TrainingSubject& subject) const {
    return check_training(TrainingCase::parse(id), subject, worlds);
  }
};

// One plant as a case: judged by us, and by published tests on the same numbers.
class PlantedCheck final : public Case {
 public:
  explicit PlantedCheck(Plant plant) : plant_(std::move(plant)) {}
  std::string id() const override { return plant_.case_id; }
  CasePtr shrunk(const std::function<bool(const Case&)>&) const override { return nullptr; }
  CaseResult check(Worlds& worlds) const override {
    PeerTests peers = std::visit(AskedPeers{plant_.case_id}, plant_.subject);
    Plant observed = plant_;
    std::visit([&](auto& subject) { subject.observe = peers.observer(); }, observed.subject);
    CaseResult result = check_plant(observed, worlds);
    result.peers = peers.judge();
    return result;
  }

 private:
  Plant plant_;
};

// Where in a program a wrong tensor belongs.
std::string stage_of(const std::string& name) {
  if (name.ends_with(":grad")) return "GRAD";
  if (name.ends_with("grad_norm")) return "NORM";
  if (name.ends_with("loss")) return "LOSS";
  if (name.find(':') != std::string::npos) return "STEP";
  return "FWD";
}

bool matches(const std::string& name, const std::vector<std::string>& patterns) {
  return std::any_of(patterns.begin(), patterns.end(), [&](const std::string& pattern) {
    return fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
  });
}

Plant with_seed(const Plant& plant, std::optional<uint64_t> seed) {
  Plant other = plant;
  const size_t hash = plant.case_id.rfind('#');
  if (seed && !plant.one_seed) {
    other.case_id = fmt::format("{}#{}", plant.case_id.substr(0, hash), *seed);
  }
  return other;
}

// As it can be planted on the device, with data of the seed.
Mutant prepared(Mutant mutant, at::Device device, std::optional<uint64_t> seed) {
  if (!device.is_cpu()) {
    std::erase_if(mutant.plants, [](const Plant& plant) { return plant.cpu_only; });
    if (mutant.plants.empty() && mutant.inexpressible.empty()) {
      mutant.inexpressible = "what catches it is judged on a CPU only";
    }
  }
  for (Plant& plant : mutant.plants) plant = with_seed(plant, seed);
  for (Plant& plant : mutant.innocent) plant = with_seed(plant, seed);
  return mutant;
}

}  // namespace

Plant without_mutant(const Plant& plant) {
  Plant clean = plant;
  std::visit([](auto& subject) { subject = {}; }, clean.subject);
  return clean;
}

CaseResult check_plant(const Plant& plant, Worlds& worlds) {
  return std::visit(CheckOf{plant.case_id, worlds}, plant.subject);
}

std::string first_finding(const CaseResult& result) {
  if (!result.first_wrong.empty()) return result.first_wrong;
  for (const CheckResult& check : result.checks) {
    if (check.status == Status::kFail) return check.name;
  }
  return {};
}

const CaseResult* MutantOutcome::kill() const {
  for (const CaseResult& result : planted) {
    if (result.status == Status::kFail) return &result;
  }
  return nullptr;
}

bool MutantOutcome::killed() const { return kill() != nullptr; }

std::set<std::string> MutantOutcome::killed_by() const {
  std::set<std::string> by;
  for (const CaseResult& result : planted) {
    for (const TensorResult& tensor : result.tensors) {
      if (tensor.status == Status::kFail) by.insert(stage_of(tensor.name));
    }
    for (const CheckResult& check : result.checks) {
      if (check.status == Status::kFail) by.insert(check.name);
    }
  }
  return by;
}

bool MutantOutcome::named() const {
  const CaseResult* result = kill();
  return result && matches(first_finding(*result), mutant.first_wrong);
}

bool MutantOutcome::cause_named_first() const {
  const CaseResult* result = kill();
  return result && !result->hypotheses.empty() && result->hypotheses[0].kind == mutant.cause;
}

bool MutantOutcome::forward_held() const {
  for (const CaseResult& result : planted) {
    for (const TensorResult& tensor : result.tensors) {
      // Later steps begin with what the first has spoilt.
      if (tensor.name.starts_with("step") && !tensor.name.starts_with("step0/")) continue;
      const std::string stage = stage_of(tensor.name);
      if (tensor.status == Status::kFail && (stage == "FWD" || stage == "LOSS")) return false;
    }
  }
  return true;
}

std::vector<std::string> MutantOutcome::false_alarms() const {
  std::vector<std::string> alarms;
  for (const CaseResult& result : innocent) {
    if (result.status == Status::kPass) continue;
    alarms.push_back(mutant.id + " in " + result.id + ": " + first_finding(result) + result.reason);
  }
  return alarms;
}

double MutantOutcome::seconds() const {
  double sum = 0;
  for (const CaseResult& result : planted) sum += result.seconds;
  return sum;
}

MutantOutcome::Peer MutantOutcome::peer(const std::string& test) const {
  Peer peer = Peer::kNotAsked;
  for (const CaseResult& result : planted) {
    for (const PeerVerdict& verdict : result.peers) {
      if (verdict.test != test) continue;
      if (!verdict.accepts) return Peer::kRefuses;
      peer = Peer::kAccepts;
    }
  }
  return peer;
}

int MutantRun::expressible() const {
  return static_cast<int>(std::count_if(outcomes.begin(), outcomes.end(),
                                        [](const auto& o) { return o.expressible(); }));
}
int MutantRun::killed() const {
  return static_cast<int>(
      std::count_if(outcomes.begin(), outcomes.end(), [](const auto& o) { return o.killed(); }));
}
int MutantRun::named() const {
  return static_cast<int>(
      std::count_if(outcomes.begin(), outcomes.end(), [](const auto& o) { return o.named(); }));
}
int MutantRun::cause_named_first() const {
  return static_cast<int>(std::count_if(outcomes.begin(), outcomes.end(),
                                        [](const auto& o) { return o.cause_named_first(); }));
}

std::vector<std::string> MutantRun::false_alarms() const {
  std::vector<std::string> alarms;
  for (const MutantOutcome& outcome : outcomes) {
    for (std::string& alarm : outcome.false_alarms()) alarms.push_back(std::move(alarm));
  }
  for (const CaseResult& result : clean) {
    if (result.status == Status::kPass) continue;
    alarms.push_back(result.id + ": " + first_finding(result) + result.reason);
  }
  return alarms;
}

bool MutantRun::holds() const { return killed() == expressible() && false_alarms().empty(); }

MutantRun run_mutants(const std::vector<Mutant>& catalogue, const RunOptions& options,
                      std::optional<uint64_t> seed) {
  std::vector<Mutant> mutants;
  std::vector<CasePtr> cases;
  std::set<std::string> clean_ids;
  std::vector<Plant> clean;
  for (const Mutant& mutant : catalogue) {
    mutants.push_back(prepared(mutant, options.device, seed));
    for (const Plant& plant : mutants.back().plants) {
      cases.push_back(std::make_shared<PlantedCheck>(plant));
      if (clean_ids.insert(plant.case_id).second) clean.push_back(without_mutant(plant));
    }
    for (const Plant& plant : mutants.back().innocent) {
      cases.push_back(std::make_shared<PlantedCheck>(plant));
    }
  }
  for (const Plant& plant : clean) cases.push_back(std::make_shared<PlantedCheck>(plant));

  RunOptions quiet = options;
  quiet.shrink_failures = 0;
  const auto start = std::chrono::steady_clock::now();
  const std::vector<CaseResult> results = run_cases(cases, quiet);
  MutantRun run;
  run.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  auto next = results.begin();
  const auto take = [&](size_t count) {
    const auto from = next;
    next += static_cast<std::ptrdiff_t>(count);
    return std::vector<CaseResult>(from, next);
  };
  for (const Mutant& mutant : mutants) {
    MutantOutcome outcome{mutant, take(mutant.plants.size()), take(mutant.innocent.size())};
    run.outcomes.push_back(std::move(outcome));
  }
  run.clean = take(clean.size());
  return run;
}

}  // namespace shardproof::verify
