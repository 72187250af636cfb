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
  void clear();

 private:
  mutable std::mutex mutex_;
  std::vector<CollectiveCall> calls_;
};

class RecordingBackend final : public c10d::Backend {
 public:
  RecordingBackend(c10::intrusive_ptr<c10d::Backend> inner, std::string group,
                   std::shared_ptr<CallLog> log);

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
  Work endCoalescing() override { return inner_->endCoalescing(); }

 private:
  void record(CollectiveCall call);

  c10::intrusive_ptr<c10d::Backend> inner_;
  std::string group_;
  std::shared_ptr<CallLog> log_;
  int64_t next_number_ = 0;
  std::map<int, int64_t> sent_, received_;  // per peer
};

}  // namespace shardproof::comm
