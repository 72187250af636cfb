#include "sim/fault_plan.h"

#include <fnmatch.h>

namespace shardproof::sim {

FaultMatcher::FaultMatcher(const FaultPlan& plan, int rank) {
  for (const Fault& fault : plan) {
    if (fault.rank == -1 || fault.rank == rank) faults_.push_back(fault);
  }
  seen_.assign(faults_.size(), 0);
}

const Fault* FaultMatcher::match(const std::string& tag) {
  const Fault* found = nullptr;
  for (size_t i = 0; i < faults_.size(); ++i) {
    if (fnmatch(faults_[i].tag.c_str(), tag.c_str(), 0) != 0) continue;
    const int64_t n = seen_[i]++;
    if (!found && (faults_[i].occurrence == -1 || faults_[i].occurrence == n)) found = &faults_[i];
  }
  return found;
}

}  // namespace shardproof::sim
