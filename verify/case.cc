#include "verify/case.h"

#include <c10/util/Exception.h>

#include <chrono>

#include "base/error.h"
#include "verify/hypothesis.h"

namespace shardproof::verify {

CheckResult check_of(const sim::CollectiveError& error) {
  switch (error.violation()) {
    case sim::ViolationKind::kRace:
      return {"race", Status::kFail, error.what()};
    case sim::ViolationKind::kDeadlock:
      return {"deadlock", Status::kFail, error.what()};
    default:
      return {"trace", Status::kFail, error.what()};
  }
}

bool run_ranks(RankWorld& world, const sim::FaultPlan& faults, const RankProgram& program,
               std::vector<RankResult>& results, std::vector<CheckResult>& checks) {
  world.plant(faults);
  try {
    world.run(program, results);
  } catch (const sim::CollectiveError& error) {
    if (error.kind() != ErrorKind::kViolation) throw;
    checks.push_back(check_of(error));
    if (!error.ranks_returned()) return false;
  }
  return world.judges();
}

CaseResult judged(const std::string& id, const comm::MeshShape& mesh,
                  const std::function<void(CaseResult&)>& judge) {
  CaseResult result;
  result.id = id;
  const auto start = std::chrono::steady_clock::now();
  try {
    judge(result);
  } catch (const sim::CollectiveError& error) {
    // The combination was accepted and ran without SP: a rank that refuses it is no reason to skip.
    result.status = Status::kError;
    result.reason = error.what();
  } catch (const Error& error) {
    result.status = error.kind() == ErrorKind::kBadInput ? Status::kSkip : Status::kError;
    result.reason = error.what();
  } catch (const c10::Error& error) {
    result.status = Status::kError;
    result.reason = error.what_without_backtrace();
  }
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  result.conclude();
  if (result.status == Status::kFail) result.hypotheses = suggest(result, mesh);
  return result;
}

}  // namespace shardproof::verify
