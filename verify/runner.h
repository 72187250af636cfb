// Runs many cases on all cores and puts the verdict together.
#pragma once
#include <functional>
#include <vector>

#include "verify/case.h"

namespace shardproof::verify {

struct RunOptions {
  at::Device device = at::kCPU;
  int lanes = 0;  // cases at the same time; 0: all cores on a CPU, 1 on CUDA
  uint64_t schedule_seed = 0;
  int shrink_failures = 2;       // this many failing cases are shrunk
  sim::FaultPlan faults;         // planted in simulated worlds
  std::string replay_arguments;  // beside the case, its own arguments and the device
  Worlds* worlds = nullptr;      // null: simulated ones
  std::function<void(size_t done, size_t all)> progress;  // may be empty
};

// Results in the order of `cases`.
std::vector<CaseResult> run_cases(const std::vector<CasePtr>& cases, const RunOptions& options);

}  // namespace shardproof::verify
