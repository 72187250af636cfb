// The simulator as a c10d::Backend: one object per rank and group.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "sim/engine/rendezvous.h"
#include "sim/tensor_parts.h"

namespace shardproof::sim {

// What a rank's backends share.
struct RankState {
  int rank = 0;
  at::Device device = at::kCPU;
  Scheduler* scheduler = nullptr;
  Rendezvous* rendezvous = nullptr;
  PartOptions defaults;
  FaultMatcher faults;
  std::map<std::string, at::Tensor> previous_results;  // by tag, kept only if a fault needs them
  bool keep_results = false;
  std::vector<DeferredCheck> deferred;
};

class SimBackend final : public c10d::Backend {
 public:
  SimBackend(RankState& state, int64_t group, std::string name, int index, int size);

  const std::string getBackendName() const override { return "sim"; }
  bool supportsCoalescing() const override { return true; }

  using Work = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                     std::vector<int64_t>& input_splits, const c10d::AllToAllOptions&) override;
  Work _allgather_base(at::Tensor& output, at::Tensor& input,
                       const c10d::AllgatherOptions&) override;
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                            const c10d::ReduceScatterOptions&) override;
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions&) override;
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions&) override;
  Work send(Tensors& tensors, int destination, int tag) override;
  Work recv(Tensors& tensors, int source, int tag) override;
  Work barrier(const c10d::BarrierOptions&) override;
  void startCoalescing() override;
  Work endCoalescing() override;

 private:
  using MakePart = std::function<std::shared_ptr<TensorPart>(PartOptions)>;
  Work issue(CollectiveCall call, const Tensors& results, const MakePart& make_part);
  Work post(const CollectiveCall& call, const Tensors& results,
            const std::shared_ptr<TensorPart>& part, const Fault* fault);
  void release_held();
  // Errors (kBadInput) that name call, group, tag and rank.
  [[noreturn]] void refuse(const char* call, const std::string& why) const;
  void require(const at::Tensor& tensor, const char* call) const;
  void require_alike(const at::Tensor& a, const at::Tensor& b, const char* call) const;
  void require_pair(const at::Tensor& small, const at::Tensor& large, const char* call) const;
  void require_rows(const at::Tensor& tensor, const std::vector<int64_t>& rows,
                    const char* call) const;

  RankState& state_;
  int64_t group_;
  std::string name_;
  at::Tensor last_sent_;
  std::function<void()> held_;  // a call that kHoldBack keeps until the next one
  std::vector<Work> coalesced_;
  bool coalescing_ = false;
};

}  // namespace shardproof::sim
