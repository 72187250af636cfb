// A backend that passes every call on to another one and records it, so that runs on NCCL, Gloo and
// the simulator leave the same trace.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <mutex>
#include <vector>

#include "base/collective_call.h"

namespace shardproof::comm {

// The calls of one rank in the order in which it issued them, over all its groups.
class CallLog {
 public:
  void add(CollectiveCall call);
  std::vector<CollectiveCall> calls() const;
  // "9 collectives, the last all_to_all [...] in group 'ulysses', tag 'out.head_to_seq'"
  std::string progress() const;
  void clear();

 private:
  mutable std::mutex mutex_;
  std::vector<CollectiveCall> calls_;
};

// Looks at the calls of a backend, and may change how they end.
class CallObserver {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;
  virtual ~CallObserver() = default;
  // Before the call is passed on. `results`: tensors of which it will overwrite every element.
  virtual void before(const CollectiveCall& call, const std::vector<at::Tensor>& results) = 0;
  // What the caller waits for in place of `work`, which may be null inside a coalesced step.
  virtual Work after(Work work) = 0;
};

class RecordingBackend final : public c10d::Backend {
 public:
  RecordingBackend(c10::intrusive_ptr<c10d::Backend> inner, std::string group,
                   std::shared_ptr<CallLog> log, std::shared_ptr<CallObserver> observer = nullptr);

  const std::string getBackendName() const override { return inner_->getBackendName(); }
  bool supportsCoalescing() const override { return inner_->supportsCoalescing(); }

  using Work = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                     std::vector<int64_t>& input_splits,
                     const c10d::AllToAllOptions& options) override;
  Work _allgather_base(at::Tensor& output, at::Tensor& input,
                       const c10d::AllgatherOptions& options) override;
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                            const c10d::ReduceScatterOptions& options) override;
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Work send(Tensors& tensors, int destination, int tag) override;
  Work recv(Tensors& tensors, int source, int tag) override;
  Work barrier(const c10d::BarrierOptions& options) override;
  void startCoalescing() override { inner_->startCoalescing(); }
  Work endCoalescing() override { return observed(inner_->endCoalescing()); }

 private:
  void record(CollectiveCall call, const Tensors& results);
  Work observed(Work work) { return observer_ ? observer_->after(std::move(work)) : work; }

  c10::intrusive_ptr<c10d::Backend> inner_;
  std::string group_;
  std::shared_ptr<CallLog> log_;
  std::shared_ptr<CallObserver> observer_;
  int64_t next_number_ = 0;
  std::map<int, int64_t> sent_, received_;  // per peer
};

}  // namespace shardproof::comm
