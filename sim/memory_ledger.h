// Memory of each virtual rank, from the allocator's own reports: requested bytes of tensor storage.
#pragma once
#include <c10/core/Allocator.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace shardproof::sim {

struct MemoryUse {
  int64_t current = 0;  // bytes
  int64_t peak = 0;
  std::map<std::string, int64_t> allocated_by_tag;  // sum of all allocations under the tag
};

// While one lives, what its thread allocates is not accounted: copies and sums that the simulator
// makes are no rank's.
class UnaccountedMemory {
 public:
  UnaccountedMemory();
  ~UnaccountedMemory();
  UnaccountedMemory(const UnaccountedMemory&) = delete;
  UnaccountedMemory& operator=(const UnaccountedMemory&) = delete;
};

// Shared by all ranks of a World. A block is accounted to the rank that allocated it, by pointer:
// LibTorch reports a free on the thread that frees, which may be another rank's.
class MemoryLedger {
 public:
  explicit MemoryLedger(int ranks) : use_(static_cast<size_t>(ranks)) {}
  void reset();
  MemoryUse use(int rank) const;
  // The peak from now on.
  void restart_peak(int rank);
  // What to install on the rank's thread, as c10::DebugInfoKind::PROFILER_STATE.
  std::shared_ptr<c10::MemoryReportingInfoBase> reporter(int rank);

 private:
  class Reporter;
  void record(int rank, void* block, int64_t bytes);

  struct Block {
    int rank;
    int64_t bytes;
  };
  mutable std::mutex mutex_;
  std::vector<MemoryUse> use_;
  std::unordered_map<void*, Block> blocks_;
};

}  // namespace shardproof::sim
