#include "comm/recording_backend.h"

#include <utility>

#include "base/error.h"
#include "comm/describe_call.h"

namespace shardproof::comm {

void CallLog::add(CollectiveCall call) {
  const std::lock_guard lock(mutex_);
  calls_.push_back(std::move(call));
}

std::vector<CollectiveCall> CallLog::calls() const {
  const std::lock_guard lock(mutex_);
  return calls_;
}

std::string CallLog::progress() const {
  const std::lock_guard lock(mutex_);
  if (calls_.empty()) return "no collective";
  const CollectiveCall& last = calls_.back();
  return fmt::format("{} collective(s), the last {} in group '{}', tag '{}'", calls_.size(),
                     last.describe(), last.group, last.tag);
}

void CallLog::clear() {
  const std::lock_guard lock(mutex_);
  calls_.clear();
}

RecordingBackend::RecordingBackend(c10::intrusive_ptr<c10d::Backend> inner, std::string group,
                                   std::shared_ptr<CallLog> log,
                                   std::shared_ptr<CallObserver> observer)
    : c10d::Backend(inner->getRank(), inner->getSize()),
      inner_(std::move(inner)),
      group_(std::move(group)),
      log_(std::move(log)),
      observer_(std::move(observer)) {}

void RecordingBackend::record(CollectiveCall call, const Tensors& results) {
  call.group = group_;
  call.number = call.kind == CallKind::kSend   ? sent_[call.peer]++
                : call.kind == CallKind::kRecv ? received_[call.peer]++
                                               : next_number_++;
  if (observer_) observer_->before(call, results);
  log_->add(std::move(call));
}

RecordingBackend::Work RecordingBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                       std::vector<int64_t>& output_splits,
                                                       std::vector<int64_t>& input_splits,
                                                       const c10d::AllToAllOptions& options) {
  record(describe_all_to_all(output, input, output_splits, input_splits, size_), {output});
  return observed(inner_->alltoall_base(output, input, output_splits, input_splits, options));
}

RecordingBackend::Work RecordingBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                         const c10d::AllgatherOptions& options) {
  record(describe_all_gather(output, input, size_), {output});
  return observed(inner_->_allgather_base(output, input, options));
}

RecordingBackend::Work RecordingBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  record(describe_reduce_scatter(output, input, options.reduceOp, size_), {output});
  return observed(inner_->_reduce_scatter_base(output, input, options));
}

RecordingBackend::Work RecordingBackend::allreduce(Tensors& tensors,
                                                   const c10d::AllreduceOptions& options) {
  record(describe_all_reduce(tensors.at(0), options.reduceOp), {});
  return observed(inner_->allreduce(tensors, options));
}

RecordingBackend::Work RecordingBackend::broadcast(Tensors& tensors,
                                                   const c10d::BroadcastOptions& options) {
  record(describe_broadcast(tensors.at(0), static_cast<int>(options.rootRank)),
         options.rootRank == rank_ ? Tensors{} : tensors);
  return observed(inner_->broadcast(tensors, options));
}

RecordingBackend::Work RecordingBackend::send(Tensors& tensors, int destination, int tag) {
  record(describe_send(tensors.at(0), destination), {});
  return observed(inner_->send(tensors, destination, tag));
}

RecordingBackend::Work RecordingBackend::recv(Tensors& tensors, int source, int tag) {
  record(describe_receive(tensors.at(0), source), tensors);
  return observed(inner_->recv(tensors, source, tag));
}

RecordingBackend::Work RecordingBackend::barrier(const c10d::BarrierOptions& options) {
  record(describe_barrier(), {});
  return observed(inner_->barrier(options));
}

}  // namespace shardproof::comm
