#include "sim/sim_backend.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "comm/describe_call.h"
#include "comm/tag.h"

namespace shardproof::sim {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = SimBackend::Tensors;

class SimWork final : public c10d::Work {
 public:
  SimWork(RankState& state, Tensors results) : state_(state), results_(std::move(results)) {}

  void posted(std::shared_ptr<Ticket> ticket, std::shared_ptr<TensorPart> part, std::string tag) {
    ticket_ = std::move(ticket);
    part_ = std::move(part);
    tag_ = std::move(tag);
  }
  // The wait will return at once and nothing will arrive.
  void never_deliver() { skip_ = true; }
  // The call was not made: there is nothing to wait for.
  void never_made() { omitted_ = true; }
  // A held-back call is issued at the latest when it is waited for.
  void before_wait(std::function<void()> release) { release_ = std::move(release); }

  bool wait(std::chrono::milliseconds) override {
    if (omitted_) return true;
    if (release_ && !ticket_) std::exchange(release_, {})();
    if (skip_) {
      state_.rendezvous->abandon(*ticket_);
      return true;
    }
    state_.rendezvous->wait(state_.rank, *ticket_);
    if (state_.keep_results && part_ && part_->output().defined()) {
      state_.previous_results[tag_] = part_->output().clone();
    }
    part_.reset();  // the buffers belong to the caller and to members that have yet to read
    finish();
    return true;
  }
  std::vector<at::Tensor> result() override { return results_; }

 private:
  RankState& state_;
  Tensors results_;
  std::shared_ptr<Ticket> ticket_;
  std::shared_ptr<TensorPart> part_;
  std::string tag_;
  std::function<void()> release_;
  bool skip_ = false, omitted_ = false;
};

// All calls of a coalesced step.
class StepWork final : public c10d::Work {
 public:
  // `release`: issues what a fault still holds back of the step.
  StepWork(std::vector<WorkPtr> works, std::function<void()> release)
      : works_(std::move(works)), release_(std::move(release)) {}
  bool wait(std::chrono::milliseconds timeout) override {
    release_();
    for (WorkPtr& work : works_) work->wait(timeout);
    finish();
    return true;
  }

 private:
  std::vector<WorkPtr> works_;
  std::function<void()> release_;
};

ReduceOperation operation(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::AVG:
      return ReduceOperation::kAverage;
    case c10d::ReduceOp::MAX:
      return ReduceOperation::kMax;
    case c10d::ReduceOp::MIN:
      return ReduceOperation::kMin;
    case c10d::ReduceOp::PRODUCT:
      return ReduceOperation::kProduct;
    default:
      return ReduceOperation::kSum;  // describe_*() refuses what is none of these
  }
}

}  // namespace

SimBackend::SimBackend(RankState& state, int64_t group, std::string name, int index, int size)
    : c10d::Backend(index, size), state_(state), group_(group), name_(std::move(name)) {}

void SimBackend::refuse(const char* call, const std::string& why) const {
  bad_input("{} in group '{}', tag '{}', rank {}: {}", call, name_, comm::current_tag(),
            state_.rank, why);
}

void SimBackend::require(const at::Tensor& tensor, const char* call) const {
  if (tensor.device().type() != state_.device.type() && !tensor.is_meta()) {
    refuse(call, c10::str("the world moves tensors on ", state_.device, "; got one on ",
                          tensor.device()));
  }
  if (tensor.is_contiguous()) return;
  refuse(call, c10::str("the simulator, like NCCL, takes contiguous tensors; got sizes ",
                        tensor.sizes(), ", strides ", tensor.strides()));
}

// `large` holds one `small` for each member.
void SimBackend::require_pair(const at::Tensor& small, const at::Tensor& large,
                              const char* call) const {
  require(small, call);
  require(large, call);
  require_alike(small, large, call);
  if (large.numel() == small.numel() * size_) return;
  refuse(call, c10::str("expected sizes that differ by the ", size_, " members; got ",
                        small.sizes(), " and ", large.sizes()));
}

void SimBackend::require_alike(const at::Tensor& a, const at::Tensor& b, const char* call) const {
  if (a.scalar_type() == b.scalar_type() && a.device() == b.device()) return;
  refuse(call, c10::str("expected input and output of one dtype and device; got ", a.scalar_type(),
                        " on ", a.device(), " and ", b.scalar_type(), " on ", b.device()));
}

// Row counts per member as c10d has them: none means even.
void SimBackend::require_rows(const at::Tensor& tensor, const std::vector<int64_t>& rows,
                              const char* call) const {
  const bool fit =
      rows.empty() ? tensor.size(0) % size_ == 0
                   : rows.size() == static_cast<size_t>(size_) &&
                         std::all_of(rows.begin(), rows.end(), [](auto r) { return r >= 0; }) &&
                         std::accumulate(rows.begin(), rows.end(), int64_t{0}) == tensor.size(0);
  if (fit) return;
  refuse(call, fmt::format("expected {} row counts that add up to {}; got {}", size_,
                           tensor.size(0), rows));
}

void SimBackend::release_held() {
  if (held_) std::exchange(held_, {})();
}

SimBackend::Work SimBackend::issue(CollectiveCall call, const Tensors& results,
                                   const MakePart& make_part) {
  const Fault* fault = state_.faults.match(call.tag);
  if (fault && fault->kind == FaultKind::kKill) {
    throw_error(ErrorKind::kViolation, "rank {} was killed by the fault plan at tag '{}'",
                state_.rank, call.tag);
  }
  PartOptions options = state_.defaults;
  options.fault = fault;
  options.deferred = &state_.deferred;
  options.own_last_sent = fault && fault->kind == FaultKind::kEcho ? last_sent_ : at::Tensor();
  if (state_.keep_results) options.previous_result = state_.previous_results[call.tag];
  options.what = fmt::format("{} in group '{}', tag '{}', rank {}",
                             shardproof::to_string(call.kind), name_, call.tag, state_.rank);
  Work work = post(call, results, make_part(std::move(options)), fault);
  if (coalescing_) coalesced_.push_back(work);
  return work;
}

SimBackend::Work SimBackend::post(const CollectiveCall& call, const Tensors& results,
                                  const std::shared_ptr<TensorPart>& part, const Fault* fault) {
  auto work = c10::make_intrusive<SimWork>(state_, results);
  const std::string tag = call.tag;
  const auto do_post = [this, work, call, part, tag] {
    work->posted(state_.rendezvous->post(state_.rank, group_, call, part), part, tag);
  };
  if (fault && fault->kind == FaultKind::kOmit) {
    part->begin();
    work->never_made();
    return work;
  }
  // A send and the receive beside it, torn apart, would wait for each other all around a ring.
  const bool pair = coalescing_ && (call.kind == CallKind::kSend || call.kind == CallKind::kRecv);
  if (fault && fault->kind == FaultKind::kHoldBack && !pair) {
    release_held();
    held_ = do_post;
    work->before_wait([this] { release_held(); });
    return work;
  }
  if (fault && fault->kind == FaultKind::kDelay) {
    for (int i = 0; i < state_.scheduler->ranks(); ++i) state_.scheduler->yield(state_.rank);
  }
  if (fault && fault->kind == FaultKind::kSkipWait) work->never_deliver();
  do_post();
  if (fault && fault->kind == FaultKind::kReuse) part->overwrite_input();
  release_held();
  return work;
}

SimBackend::Work SimBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                           std::vector<int64_t>& output_splits,
                                           std::vector<int64_t>& input_splits,
                                           const c10d::AllToAllOptions&) {
  require(input, "all_to_all");
  require(output, "all_to_all");
  require_alike(input, output, "all_to_all");
  require_rows(input, input_splits, "all_to_all");
  require_rows(output, output_splits, "all_to_all");
  const CollectiveCall call =
      comm::describe_all_to_all(output, input, output_splits, input_splits, size_);
  return issue(call, {output}, [&](PartOptions options) {
    return all_to_all_part(input, output, call.send, call.receive, static_cast<size_t>(rank_),
                           std::move(options));
  });
}

SimBackend::Work SimBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                             const c10d::AllgatherOptions&) {
  require_pair(input, output, "all_gather");
  return issue(comm::describe_all_gather(output, input, size_), {output}, [&](PartOptions options) {
    return all_gather_part(input, output, std::move(options));
  });
}

SimBackend::Work SimBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                  const c10d::ReduceScatterOptions& scatter) {
  require_pair(output, input, "reduce_scatter");
  const ReduceOperation op = operation(scatter.reduceOp);
  return issue(comm::describe_reduce_scatter(output, input, scatter.reduceOp, size_), {output},
               [&](PartOptions options) {
                 return reduce_scatter_part(input, output, op, static_cast<size_t>(rank_),
                                            std::move(options));
               });
}

SimBackend::Work SimBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& reduce) {
  const at::Tensor& tensor = tensors.at(0);
  require(tensor, "all_reduce");
  const ReduceOperation op = operation(reduce.reduceOp);
  return issue(
      comm::describe_all_reduce(tensor, reduce.reduceOp), tensors,
      [&](PartOptions options) { return all_reduce_part(tensor, op, std::move(options)); });
}

SimBackend::Work SimBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& cast) {
  const at::Tensor& tensor = tensors.at(0);
  require(tensor, "broadcast");
  if (cast.rootRank < 0 || cast.rootRank >= size_) {
    refuse("broadcast",
           fmt::format("no member {}; expected one of 0..{}", cast.rootRank, size_ - 1));
  }
  const CollectiveCall call = comm::describe_broadcast(tensor, static_cast<int>(cast.rootRank));
  return issue(call, tensors, [&](PartOptions options) {
    return broadcast_part(tensor, static_cast<size_t>(call.root), static_cast<size_t>(rank_),
                          std::move(options));
  });
}

SimBackend::Work SimBackend::send(Tensors& tensors, int destination, int) {
  const at::Tensor& tensor = tensors.at(0);
  require(tensor, "send");
  if (state_.keep_results) last_sent_ = tensor;
  return issue(comm::describe_send(tensor, destination), tensors,
               [&](PartOptions options) { return send_part(tensor, std::move(options)); });
}

SimBackend::Work SimBackend::recv(Tensors& tensors, int source, int) {
  const at::Tensor& tensor = tensors.at(0);
  require(tensor, "recv");
  return issue(comm::describe_receive(tensor, source), tensors,
               [&](PartOptions options) { return recv_part(tensor, std::move(options)); });
}

SimBackend::Work SimBackend::barrier(const c10d::BarrierOptions&) {
  return issue(comm::describe_barrier(), {}, [](const PartOptions&) { return barrier_part(); });
}

void SimBackend::startCoalescing() {
  SP_CHECK(!coalescing_, "a coalesced step is open in group '{}'", name_);
  coalescing_ = true;
  state_.rendezvous->begin_step(state_.rank);
}

SimBackend::Work SimBackend::endCoalescing() {
  SP_CHECK(coalescing_, "no coalesced step is open in group '{}'", name_);
  coalescing_ = false;
  state_.rendezvous->end_step(state_.rank);
  return c10::make_intrusive<StepWork>(std::exchange(coalesced_, {}), [this] { release_held(); });
}

}  // namespace shardproof::sim
