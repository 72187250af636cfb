// What the runner runs: a case that judges itself, whatever it is about.
#pragma once
#include <functional>
#include <memory>
#include <string>

#include "comm/mesh_shape.h"
#include "verify/rank_world.h"
#include "verify/verdict/verdict.h"

namespace shardproof::verify {

class Case;
using CasePtr = std::shared_ptr<const Case>;

class Case {
 public:
  virtual ~Case() = default;
  virtual std::string id() const = 0;
  // Never throws for what the subject does wrong: that is the result.
  virtual CaseResult check(Worlds& worlds) const = 0;
  // What a command line that replays the case needs beside --case; "" if nothing.
  virtual std::string replay_arguments() const { return {}; }
  // A small case of which `fails` holds as it does of this one; null if there is none (a golden).
  virtual CasePtr shrunk(const std::function<bool(const Case&)>& fails) const = 0;
};

// The check that a violation of the collectives fails: race, deadlock or trace.
CheckResult check_of(const sim::CollectiveError& error);

// Runs the program with `faults` planted; what the collectives violate becomes one of `checks`.
// False if there is nothing to judge here: the run was ended, or another process judges.
bool run_ranks(RankWorld& world, const sim::FaultPlan& faults, const RankProgram& program,
               std::vector<RankResult>& results, std::vector<CheckResult>& checks);

// Runs `judge` and concludes the result. A combination that cannot be built (kBadInput) is a skip
// with its reason; any other exception is an error, as is a rank that refuses what can be built.
CaseResult judged(const std::string& id, const comm::MeshShape& mesh,
                  const std::function<void(CaseResult&)>& judge);

}  // namespace shardproof::verify
