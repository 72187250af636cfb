#include "sim/delivery_guard.h"

#include <ATen/ATen.h>

#include <chrono>
#include <thread>
#include <utility>

#include "base/error.h"
#include "sim/poison.h"

namespace shardproof::sim {
namespace {

using namespace std::chrono_literals;

// Longer than any transport takes to deliver a small message.
constexpr auto kDelay = 100ms;

class WorkThatDoesNotWait final : public c10d::Work {
 public:
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
};

}  // namespace

DeliveryGuard::DeliveryGuard(const FaultPlan& faults, int rank)
    : rank_(rank), faults_(faults, rank) {
  for (const Fault& fault : faults) {
    if (fault.kind == FaultKind::kSkipWait || fault.kind == FaultKind::kDelay ||
        fault.kind == FaultKind::kKill || fault.kind == FaultKind::kHang) {
      continue;
    }
    bad_input(
        "the fault '{}' can be planted in the simulator only; on real ranks: skip-wait, delay, "
        "kill, hang",
        fault_name(fault.kind));
  }
}

void DeliveryGuard::before(const CollectiveCall& call, const std::vector<at::Tensor>& results) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& result : results) poison(result);
  const Fault* fault = faults_.match(call.tag);
  if (!fault) return;
  switch (fault->kind) {
    case FaultKind::kSkipWait:
      skip_wait_ = true;
      break;
    case FaultKind::kDelay:
      std::this_thread::sleep_for(kDelay);
      break;
    case FaultKind::kHang:
      while (true) std::this_thread::sleep_for(1h);
    default:
      throw_error(ErrorKind::kViolation, "rank {} was killed by the fault plan at tag '{}'", rank_,
                  call.tag);
  }
}

DeliveryGuard::Work DeliveryGuard::after(Work work) {
  // Calls inside a step have no work of their own: the step's counts.
  if (!skip_wait_ || !work) return work;
  skip_wait_ = false;
  unwaited_.push_back(std::move(work));
  return c10::make_intrusive<WorkThatDoesNotWait>();
}

}  // namespace shardproof::sim
