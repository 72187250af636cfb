// Plants mutants and looks at what the checks say.
#pragma once
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "verify/case.h"
#include "verify/mutants/mutant.h"
#include "verify/runner.h"

namespace shardproof::verify {

struct MutantOutcome {
  Mutant mutant;
  std::vector<CaseResult> planted;   // as mutant.plants, with what published tests say
  std::vector<CaseResult> innocent;  // as mutant.innocent

  bool expressible() const { return mutant.inexpressible.empty(); }
  bool killed() const;  // in one of its cases
  // The first case in which it was; null if it survived.
  const CaseResult* kill() const;
  // What failed in its cases: FWD, GRAD, LOSS, NORM, STEP by the names of tensors, and names of
  // checks.
  std::set<std::string> killed_by() const;
  // The first wrong tensor (or check, where no tensor is wrong) is an expected one.
  bool named() const;
  bool cause_named_first() const;
  // Of mutants whose source says that the forward is right: no forward check fails.
  bool forward_held() const;
  // Cases in which it must not fire, and does.
  std::vector<std::string> false_alarms() const;
  double seconds() const;
  // What a published test says: refuses if it does in one case; nothing if it was never asked.
  enum class Peer { kNotAsked, kAccepts, kRefuses };
  Peer peer(const std::string& test) const;
};

struct MutantRun {
  std::vector<MutantOutcome> outcomes;
  std::vector<CaseResult> clean;  // the same cases without a mutant
  double seconds = 0;

  int expressible() const;
  int killed() const;
  int named() const;
  int cause_named_first() const;
  // Correct cases that failed, "<id>: <what>".
  std::vector<std::string> false_alarms() const;
  // Every expressible mutant is killed, and there was no false alarm.
  bool holds() const;
};

// On all cores; `options`: of the runner, faults and shrinking aside. `seed`: of the cases' data;
// nothing: the catalogue's own.
MutantRun run_mutants(const std::vector<Mutant>& catalogue, const RunOptions& options,
                      std::optional<uint64_t> seed = {});

// The same case without anything planted.
Plant without_mutant(const Plant& plant);

// The plant's case, judged by the checks of its kind.
CaseResult check_plant(const Plant& plant, Worlds& worlds);

// Name of the first wrong tensor of a case, else of its first failing check; empty if none.
std::string first_finding(const CaseResult& result);

}  // namespace shardproof::verify
