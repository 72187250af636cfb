// On real transports, what the simulator does to every delivery: results are poisoned until they
// arrive, so that a read before the wait (or on a stream that has not waited) shows as NaN; and the
// faults that a real network and a real process can have.
#pragma once
#include <vector>

#include "comm/recording_backend.h"
#include "sim/fault_plan.h"

namespace shardproof::sim {

class DeliveryGuard final : public comm::CallObserver {
 public:
  // Errors (kBadInput): a fault other than skip-wait, delay, kill and hang.
  DeliveryGuard(const FaultPlan& faults, int rank);

  void before(const CollectiveCall& call, const std::vector<at::Tensor>& results) override;
  Work after(Work work) override;

 private:
  int rank_;
  FaultMatcher faults_;
  bool skip_wait_ = false;      // of the call or step that is being issued
  std::vector<Work> unwaited_;  // kept alive: the transport still writes into their results
};

}  // namespace shardproof::sim
