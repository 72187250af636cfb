#include "sim/memory_ledger.h"

#include <algorithm>

#include "comm/tag.h"

namespace shardproof::sim {

namespace {
thread_local int unaccounted = 0;
}  // namespace

UnaccountedMemory::UnaccountedMemory() { ++unaccounted; }
UnaccountedMemory::~UnaccountedMemory() { --unaccounted; }

class MemoryLedger::Reporter : public c10::MemoryReportingInfoBase {
 public:
  Reporter(MemoryLedger& ledger, int rank) : ledger_(ledger), rank_(rank) {}
  void reportMemoryUsage(void* block, int64_t bytes, size_t, size_t, c10::Device) override {
    ledger_.record(rank_, block, bytes);
  }
  bool memoryProfilingEnabled() const override { return true; }

 private:
  MemoryLedger& ledger_;
  int rank_;
};

std::shared_ptr<c10::MemoryReportingInfoBase> MemoryLedger::reporter(int rank) {
  return std::make_shared<Reporter>(*this, rank);
}

void MemoryLedger::reset() {
  std::lock_guard lock(mutex_);
  std::fill(use_.begin(), use_.end(), MemoryUse{});
  blocks_.clear();
}

void MemoryLedger::restart_peak(int rank) {
  const std::lock_guard lock(mutex_);
  MemoryUse& use = use_.at(static_cast<size_t>(rank));
  use.peak = use.current;
}

MemoryUse MemoryLedger::use(int rank) const {
  std::lock_guard lock(mutex_);
  return use_.at(static_cast<size_t>(rank));
}

void MemoryLedger::record(int rank, void* block, int64_t bytes) {
  std::lock_guard lock(mutex_);
  if (bytes > 0) {
    if (unaccounted > 0) return;
    MemoryUse& use = use_[static_cast<size_t>(rank)];
    blocks_[block] = {rank, bytes};
    use.current += bytes;
    use.peak = std::max(use.peak, use.current);
    use.allocated_by_tag[comm::current_tag()] += bytes;
    return;
  }
  const auto it = blocks_.find(block);
  if (it == blocks_.end()) return;  // allocated before the run began
  use_[static_cast<size_t>(it->second.rank)].current -= it->second.bytes;
  blocks_.erase(it);
}

}  // namespace shardproof::sim
