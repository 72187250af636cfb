// Typed collectives of one group of ranks over any c10d::Backend (NCCL, Gloo, the simulator).
//
// All data travels along dimension 0 of contiguous tensors. Results come as Pending, whose wait()
// yields the tensor: a result cannot be read before the wait. Inputs are taken by value: one that
// is moved in is freed as soon as the transport is done with it. Errors (kInternal) name group,
// tag, rank and shape: a tensor that is not contiguous, splits that do not add up, a rank outside
// the group.
#pragma once
#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace shardproof::comm {

// Makes the backends of one rank's groups; implemented per transport.
class BackendFactory {
 public:
  virtual ~BackendFactory() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  virtual at::Device device() const = 0;
  // Collective over `ranks` (world ranks, in group order): every member calls it in the same order.
  virtual c10::intrusive_ptr<c10d::Backend> create(const std::string& name,
                                                   const std::vector<int>& ranks) = 0;
};

// A result that has been asked for. Must be waited for exactly once.
class [[nodiscard]] Pending {
 public:
  explicit Pending(at::Tensor ready) : result_(std::move(ready)) {}
  // `finish` turns what arrived into the result (takes padding away); it runs inside wait().
  Pending(std::vector<c10::intrusive_ptr<c10d::Work>> works, at::Tensor result,
          std::function<at::Tensor(const at::Tensor&)> finish = {})
      : works_(std::move(works)), result_(std::move(result)), finish_(std::move(finish)) {}
  at::Tensor wait();

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
  at::Tensor result_;
  std::function<at::Tensor(const at::Tensor&)> finish_;
};

enum class Reduce { kSum, kAverage, kMax };

class Communicator {
 public:
  // A group of this rank alone; its calls are identities.
  Communicator() = default;
  Communicator(std::string name, int world_rank)
      : name_(std::move(name)), world_ranks_({world_rank}) {}
  Communicator(c10::intrusive_ptr<c10d::Backend> backend, std::string name,
               std::vector<int> world_ranks);

  int rank() const { return rank_; }  // index in the group
  int size() const { return static_cast<int>(world_ranks_.size()); }
  const std::string& name() const { return name_; }
  const std::vector<int>& world_ranks() const { return world_ranks_; }

  // input [sum(send_rows), ...] -> [sum(receive_rows), ...]; row counts per member.
  Pending all_to_all(at::Tensor input, std::vector<int64_t> send_rows,
                     std::vector<int64_t> receive_rows) const;

  // Several all-to-alls as one step (NCCL groups the calls): tensors that lie apart travel without
  // being copied together first. `rows[i]` are the counts of inputs[i].
  struct RowCounts {
    std::vector<int64_t> send, receive;
  };
  std::vector<at::Tensor> all_to_all_step(std::vector<at::Tensor> inputs,
                                          const std::vector<RowCounts>& rows) const;

  // input [rows[rank], ...] -> [sum(rows), ...]. Unequal rows travel padded to the largest.
  Pending all_gather(at::Tensor input, const std::vector<int64_t>& rows) const;

  // input [sum(rows), ...] -> [rows[rank], ...].
  Pending reduce_scatter(at::Tensor input, const std::vector<int64_t>& rows,
                         Reduce op = Reduce::kSum) const;

  // Several all-gathers or reduce-scatters as one step, into tensors that the caller has:
  // outputs[i] [size*n, ...] from inputs[i] [n, ...], and the reverse. wait() yields nothing.
  Pending all_gather_step(std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs) const;
  Pending reduce_scatter_step(std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs,
                              Reduce op = Reduce::kSum) const;
  // Several tensors in place as one step.
  Pending all_reduce_step(std::vector<at::Tensor> tensors, Reduce op = Reduce::kSum) const;

  // In place; wait() yields `tensor` itself.
  Pending all_reduce(const at::Tensor& tensor, Reduce op = Reduce::kSum) const;
  Pending broadcast(const at::Tensor& tensor, int root) const;

  // Sends `tensor` to member `to` and receives a tensor of shape `receive_shape` (same dtype and
  // device) from member `from`, as one step where the backend can (NCCL groups the two calls).
  // `tensor` must stay untouched until the wait.
  Pending exchange(at::Tensor tensor, int to, at::IntArrayRef receive_shape, int from) const;

  void barrier() const;

 private:
  using Work = c10::intrusive_ptr<c10d::Work>;
  // Issues calls as one step where the backend can; what is to be waited for.
  std::vector<Work> issue_together(size_t calls, const std::function<Work(size_t)>& issue) const;
  // Checks the call; where its result will be.
  at::Tensor all_to_all_output(const at::Tensor& input, const std::vector<int64_t>& send_rows,
                               const std::vector<int64_t>& receive_rows) const;
  void check_pair(const at::Tensor& small, const at::Tensor& large, const char* call) const;
  void check(const at::Tensor& tensor, const char* call) const;
  [[noreturn]] void refuse(const at::Tensor& tensor, const char* call,
                           const std::string& why) const;

  c10::intrusive_ptr<c10d::Backend> backend_;
  std::string name_ = "self";
  std::vector<int> world_ranks_ = {0};
  int rank_ = 0;
};

}  // namespace shardproof::comm
