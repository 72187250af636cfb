#include "comm/communicator.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "comm/tag.h"

namespace shardproof::comm {
namespace {

using Work = c10::intrusive_ptr<c10d::Work>;

int64_t sum(const std::vector<int64_t>& rows) {
  return std::accumulate(rows.begin(), rows.end(), int64_t{0});
}

// All counts are possible and there is one for each of `members`.
bool are_counts(const std::vector<int64_t>& rows, int members) {
  return rows.size() == static_cast<size_t>(members) &&
         std::all_of(rows.begin(), rows.end(), [](int64_t r) { return r >= 0; });
}

bool all_equal(const std::vector<int64_t>& rows) {
  return std::all_of(rows.begin(), rows.end(), [&](int64_t r) { return r == rows[0]; });
}

std::vector<int64_t> with_rows(const at::Tensor& like, int64_t rows) {
  auto shape = like.sizes().vec();
  shape[0] = rows;
  return shape;
}

c10d::ReduceOp reduce_op(Reduce op) {
  switch (op) {
    case Reduce::kSum:
      return c10d::ReduceOp::SUM;
    case Reduce::kAverage:
      return c10d::ReduceOp::AVG;
    case Reduce::kMax:
      return c10d::ReduceOp::MAX;
  }
  return c10d::ReduceOp::SUM;
}

// [sum(rows), ...] -> [n*largest, ...] with zeros behind each member's rows.
at::Tensor pad_members(const at::Tensor& input, const std::vector<int64_t>& rows, int64_t largest) {
  at::Tensor padded =
      at::zeros(with_rows(input, largest * static_cast<int64_t>(rows.size())), input.options());
  int64_t from = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    padded.narrow(0, static_cast<int64_t>(i) * largest, rows[i])
        .copy_(input.narrow(0, from, rows[i]));
    from += rows[i];
  }
  return padded;
}

at::Tensor unpad_members(const at::Tensor& padded, const std::vector<int64_t>& rows,
                         int64_t largest) {
  std::vector<at::Tensor> parts;
  for (size_t i = 0; i < rows.size(); ++i) {
    parts.push_back(padded.narrow(0, static_cast<int64_t>(i) * largest, rows[i]));
  }
  return at::cat(parts, 0);
}

}  // namespace

at::Tensor Pending::wait() {
  for (Work& work : works_) work->wait();
  works_.clear();
  return finish_ ? finish_(std::exchange(result_, {})) : std::move(result_);
}

Communicator::Communicator(c10::intrusive_ptr<c10d::Backend> backend, std::string name,
                           std::vector<int> world_ranks)
    : backend_(std::move(backend)), name_(std::move(name)), world_ranks_(std::move(world_ranks)) {
  SP_CHECK(backend_->getSize() == size(), "group '{}': backend of {} ranks for {} members", name_,
           backend_->getSize(), size());
  rank_ = backend_->getRank();
}

void Communicator::refuse(const at::Tensor& tensor, const char* call,
                          const std::string& why) const {
  const std::string what = !tensor.defined()
                               ? "undefined"
                               : c10::str(c10::toString(tensor.scalar_type()), " ", tensor.sizes(),
                                          ", strides ", tensor.strides());
  internal_error("{} in group '{}', tag '{}', rank {}: {}; the tensor is {}", call, name_,
                 current_tag(), rank_, why, what);
}

void Communicator::check(const at::Tensor& tensor, const char* call) const {
  if (!tensor.defined()) refuse(tensor, call, "expected a tensor");
  if (!tensor.is_contiguous()) refuse(tensor, call, "expected a contiguous tensor");
  if (tensor.dim() == 0) refuse(tensor, call, "expected at least one dimension");
}

std::vector<Work> Communicator::issue_together(size_t calls,
                                               const std::function<Work(size_t)>& issue) const {
  std::vector<Work> works;
  const bool grouped = calls > 0 && backend_->supportsCoalescing();
  if (grouped) backend_->startCoalescing();
  for (size_t i = 0; i < calls; ++i) works.push_back(issue(i));
  // The step's work stands for those of its calls, which some backends leave undefined.
  if (grouped) works = {backend_->endCoalescing()};
  return works;
}

at::Tensor Communicator::all_to_all_output(const at::Tensor& input,
                                           const std::vector<int64_t>& send_rows,
                                           const std::vector<int64_t>& receive_rows) const {
  check(input, "all_to_all");
  if (!are_counts(send_rows, size()) || !are_counts(receive_rows, size()) ||
      sum(send_rows) != input.size(0)) {
    refuse(input, "all_to_all",
           fmt::format("expected {} send and receive counts, none negative, the former adding up "
                       "to the rows; got {} and {}",
                       size(), send_rows, receive_rows));
  }
  return size() == 1 ? input : at::empty(with_rows(input, sum(receive_rows)), input.options());
}

Pending Communicator::all_to_all(at::Tensor input, std::vector<int64_t> send_rows,
                                 std::vector<int64_t> receive_rows) const {
  at::Tensor output = all_to_all_output(input, send_rows, receive_rows);
  if (size() == 1) return Pending(std::move(output));
  Work work = backend_->alltoall_base(output, input, receive_rows, send_rows, {});
  input.reset();  // a parameter lives to the end of the caller's statement, the wait included
  return Pending({std::move(work)}, std::move(output));
}

std::vector<at::Tensor> Communicator::all_to_all_step(std::vector<at::Tensor> inputs,
                                                      const std::vector<RowCounts>& rows) const {
  std::vector<at::Tensor> outputs;
  const auto make_output = [&](size_t i) -> at::Tensor& {
    return outputs.emplace_back(all_to_all_output(inputs[i], rows.at(i).send, rows.at(i).receive));
  };
  if (size() == 1) {
    for (size_t i = 0; i < inputs.size(); ++i) make_output(i);
    return outputs;
  }
  auto works = issue_together(inputs.size(), [&](size_t i) {
    auto send = rows.at(i).send, receive = rows.at(i).receive;
    Work work = backend_->alltoall_base(make_output(i), inputs[i], receive, send, {});
    inputs[i].reset();  // freed as soon as the transport is done with it
    return work;
  });
  Pending(std::move(works), at::Tensor()).wait();
  return outputs;
}

Pending Communicator::all_gather(at::Tensor input, const std::vector<int64_t>& rows) const {
  check(input, "all_gather");
  if (!are_counts(rows, size()) || rows[static_cast<size_t>(rank_)] != input.size(0)) {
    refuse(input, "all_gather",
           fmt::format("row counts {} do not fit the group or this rank's tensor", rows));
  }
  if (size() == 1) return Pending(std::move(input));
  const int64_t largest = *std::max_element(rows.begin(), rows.end());
  if (!all_equal(rows)) input = pad_members(input, {input.size(0)}, largest);
  at::Tensor output = at::empty(with_rows(input, largest * size()), input.options());
  Work work = backend_->_allgather_base(output, input, {});
  input.reset();
  if (all_equal(rows)) return Pending({std::move(work)}, std::move(output));
  return Pending({std::move(work)}, std::move(output), [rows, largest](const at::Tensor& padded) {
    return unpad_members(padded, rows, largest);
  });
}

Pending Communicator::reduce_scatter(at::Tensor input, const std::vector<int64_t>& rows,
                                     Reduce op) const {
  check(input, "reduce_scatter");
  if (!are_counts(rows, size()) || sum(rows) != input.size(0)) {
    refuse(input, "reduce_scatter",
           fmt::format("row counts {} do not fit the group or the tensor's rows", rows));
  }
  if (size() == 1) return Pending(std::move(input));
  const int64_t largest = *std::max_element(rows.begin(), rows.end());
  const int64_t mine = rows[static_cast<size_t>(rank_)];
  if (!all_equal(rows)) input = pad_members(input, rows, largest);
  at::Tensor output = at::empty(with_rows(input, largest), input.options());
  c10d::ReduceScatterOptions options;
  options.reduceOp = reduce_op(op);
  Work work = backend_->_reduce_scatter_base(output, input, options);
  input.reset();
  return Pending({std::move(work)}, output.narrow(0, 0, mine));
}

void Communicator::check_pair(const at::Tensor& small, const at::Tensor& large,
                              const char* call) const {
  check(small, call);
  check(large, call);
  if (large.sizes() == at::IntArrayRef(with_rows(small, small.size(0) * size()))) return;
  refuse(large, call,
         fmt::format("expected {} times the rows of {}", size(), c10::str(small.sizes())));
}

Pending Communicator::all_gather_step(std::vector<at::Tensor> inputs,
                                      std::vector<at::Tensor> outputs) const {
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_pair(inputs[i], outputs.at(i), "all_gather_step");
    if (size() == 1) outputs[i].copy_(inputs[i]);
  }
  if (size() == 1) return Pending(at::Tensor());
  return Pending(issue_together(inputs.size(),
                                [&](size_t i) {
                                  return backend_->_allgather_base(outputs[i], inputs[i], {});
                                }),
                 at::Tensor());
}

Pending Communicator::reduce_scatter_step(std::vector<at::Tensor> inputs,
                                          std::vector<at::Tensor> outputs, Reduce op) const {
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_pair(outputs.at(i), inputs[i], "reduce_scatter_step");
    if (size() == 1) outputs[i].copy_(inputs[i]);
  }
  if (size() == 1) return Pending(at::Tensor());
  c10d::ReduceScatterOptions options;
  options.reduceOp = reduce_op(op);
  return Pending(
      issue_together(
          inputs.size(),
          [&](size_t i) { return backend_->_reduce_scatter_base(outputs[i], inputs[i], options); }),
      at::Tensor());
}

Pending Communicator::all_reduce_step(std::vector<at::Tensor> tensors, Reduce op) const {
  for (const at::Tensor& tensor : tensors) check(tensor, "all_reduce_step");
  if (size() == 1) return Pending(at::Tensor());
  c10d::AllreduceOptions options;
  options.reduceOp = reduce_op(op);
  return Pending(issue_together(tensors.size(),
                                [&](size_t i) {
                                  std::vector<at::Tensor> one = {tensors[i]};
                                  return backend_->allreduce(one, options);
                                }),
                 at::Tensor());
}

Pending Communicator::all_reduce(const at::Tensor& tensor, Reduce op) const {
  check(tensor, "all_reduce");
  if (size() == 1) return Pending(tensor);
  c10d::AllreduceOptions options;
  options.reduceOp = reduce_op(op);
  std::vector<at::Tensor> tensors = {tensor};
  return Pending({backend_->allreduce(tensors, options)}, tensor);
}

Pending Communicator::broadcast(const at::Tensor& tensor, int root) const {
  check(tensor, "broadcast");
  if (root < 0 || root >= size()) refuse(tensor, "broadcast", fmt::format("no member {}", root));
  if (size() == 1) return Pending(tensor);
  c10d::BroadcastOptions options;
  options.rootRank = root;
  std::vector<at::Tensor> tensors = {tensor};
  return Pending({backend_->broadcast(tensors, options)}, tensor);
}

Pending Communicator::exchange(at::Tensor tensor, int to, at::IntArrayRef receive_shape,
                               int from) const {
  check(tensor, "exchange");
  if (to < 0 || to >= size() || from < 0 || from >= size()) {
    refuse(tensor, "exchange", fmt::format("no members {} and {}", to, from));
  }
  if (size() == 1) return Pending(tensor);
  at::Tensor output = at::empty(receive_shape, tensor.options());
  std::vector<at::Tensor> sent = {std::move(tensor)};
  std::vector<at::Tensor> received = {output};
  auto works = issue_together(2, [&](size_t i) {
    return i == 0 ? backend_->send(sent, to, 0) : backend_->recv(received, from, 0);
  });
  return Pending(std::move(works), std::move(output));
}

void Communicator::barrier() const {
  if (size() > 1) backend_->barrier({})->wait();
}

}  // namespace shardproof::comm
