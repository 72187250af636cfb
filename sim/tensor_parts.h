// The data side of the simulator's collectives: Part (see engine/part.h) over tensors.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "sim/engine/part.h"
#include "sim/fault_plan.h"
#include "sim/world.h"

namespace shardproof::sim {

// Checksums taken on a device are compared when the run ends: comparing at once would synchronise.
struct DeferredCheck {
  at::Tensor before;
  at::Tensor after;
  std::string what;
};

struct PartOptions {
  bool checks = true;
  bool memory_tracked = false;  // what waits for other ranks is not the owner's memory
  ReduceOrder order = ReduceOrder::kRank;
  const Fault* fault = nullptr;  // what to plant in the delivery
  at::Tensor own_last_sent;      // for kEcho
  at::Tensor previous_result;    // for kStale
  std::vector<DeferredCheck>* deferred = nullptr;
  std::string what;  // names the call in a deferred race
};

class TensorPart : public Part {
 public:
  TensorPart(at::Tensor input, at::Tensor output, PartOptions options)
      : input_(std::move(input)), output_(std::move(output)), options_(std::move(options)) {}

  void begin() override;
  void deliver(const std::vector<std::shared_ptr<Part>>& members, SharedResult& shared) final;
  bool inputs_intact() override;
  // For kReuse. What is reduced in place is not the caller's any more.
  void overwrite_input();
  void detach_inputs() override;

  const at::Tensor& input() const { return input_; }
  const at::Tensor& output() const { return output_; }

 protected:
  virtual void fill(const std::vector<std::shared_ptr<Part>>& members, SharedResult& shared) = 0;
  const PartOptions& options() const { return options_; }
  // The member whose data stands for member `i`'s (another one under kRotatePeers).
  size_t source(size_t i, size_t members) const;

 private:
  void plant_fault();

  at::Tensor input_;   // undefined: sends nothing
  at::Tensor output_;  // undefined: receives nothing
  PartOptions options_;
  std::optional<uint64_t> checksum_;
  at::Tensor device_checksum_;
  std::optional<int64_t> version_;
};

enum class ReduceOperation { kSum, kAverage, kMax, kMin, kProduct };

// Counts are elements per member of the group; `me` is this rank's index.
std::shared_ptr<TensorPart> all_to_all_part(at::Tensor input, at::Tensor output,
                                            const std::vector<int64_t>& send,
                                            const std::vector<int64_t>& receive, size_t me,
                                            PartOptions options);
std::shared_ptr<TensorPart> all_gather_part(at::Tensor input, at::Tensor output,
                                            PartOptions options);
std::shared_ptr<TensorPart> reduce_scatter_part(at::Tensor input, at::Tensor output,
                                                ReduceOperation op, size_t me, PartOptions options);
std::shared_ptr<TensorPart> all_reduce_part(at::Tensor tensor, ReduceOperation op,
                                            PartOptions options);
std::shared_ptr<TensorPart> broadcast_part(at::Tensor tensor, size_t root, size_t me,
                                           PartOptions options);
std::shared_ptr<TensorPart> send_part(at::Tensor tensor, PartOptions options);
std::shared_ptr<TensorPart> recv_part(at::Tensor tensor, PartOptions options);
std::shared_ptr<TensorPart> barrier_part();

}  // namespace shardproof::sim
