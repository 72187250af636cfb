#include "sim/tensor_parts.h"

#include <ATen/ATen.h>

#include <cstring>
#include <limits>

#include "base/checksum.h"
#include "base/error.h"
#include "sim/memory_ledger.h"
#include "sim/poison.h"

namespace shardproof::sim {
namespace {

using at::Tensor;
using Members = std::vector<std::shared_ptr<Part>>;

const TensorPart& part(const Members& members, size_t i) {
  return static_cast<const TensorPart&>(*members[i]);
}

const char* bytes_of(const Tensor& x) { return static_cast<const char*>(x.const_data_ptr()); }

uint64_t checksum_of(const Tensor& x) { return checksum({bytes_of(x), x.nbytes()}); }

// The sum of the bits as integers, left on the device; a sum over bytes is several times slower
// than one over words.
Tensor device_sum(const Tensor& x) {
  const Tensor flat = x.view({-1});
  return as_words(flat).value_or(flat.view(at::kByte)).sum(at::kLong);
}

// Nobody but one holder can reach the memory: nothing can change it.
bool is_exclusive(const Tensor& x) { return x.use_count() == 1 && x.storage().use_count() == 1; }

bool is_plain(const Tensor& x) { return x.is_cpu() && x.is_contiguous(); }

// to[to_at .. to_at+count) = from[from_at .. ), both flattened.
void copy_elements(const Tensor& to, int64_t to_at, const Tensor& from, int64_t from_at,
                   int64_t count) {
  if (count == 0 || to.is_meta()) return;
  if (is_plain(to) && is_plain(from)) {
    const auto size = to.element_size();
    char* target = static_cast<char*>(to.mutable_data_ptr()) + to_at * size;
    const char* origin = bytes_of(from) + from_at * size;
    if (target == origin) return;  // gathered in place; others may be reading it
    std::memcpy(target, origin, static_cast<size_t>(count * size));
  } else {
    to.view({-1}).narrow(0, to_at, count).copy_(from.view({-1}).narrow(0, from_at, count));
  }
}

Tensor combine(const Tensor& a, const Tensor& b, ReduceOperation op) {
  switch (op) {
    case ReduceOperation::kSum:
    case ReduceOperation::kAverage:
      return a + b;
    case ReduceOperation::kMax:
      return at::maximum(a, b);
    case ReduceOperation::kMin:
      return at::minimum(a, b);
    case ReduceOperation::kProduct:
      return a * b;
  }
  return a;
}

// Reduces equally shaped tensors, beginning with `first`. `wide`: accumulate in fp32 or better and
// round once; else round at every hop.
Tensor reduce_in_order(const std::vector<Tensor>& xs, ReduceOperation op, size_t first, bool wide) {
  const at::ScalarType dtype = xs[0].scalar_type();
  const bool low = dtype == at::kBFloat16 || dtype == at::kHalf;
  const at::ScalarType type = wide && low ? at::kFloat : dtype;
  Tensor sum = xs[first].to(type);
  for (size_t i = 1; i < xs.size(); ++i) {
    sum = combine(sum, xs[(first + i) % xs.size()].to(type), op);
  }
  if (op == ReduceOperation::kAverage) sum = sum / static_cast<double>(xs.size());
  return sum.to(dtype);
}

Tensor reduce_members(const std::vector<Tensor>& xs, ReduceOperation op, size_t chunk,
                      ReduceOrder order) {
  if (order == ReduceOrder::kRank) return reduce_in_order(xs, op, 0, /*wide=*/true);
  return reduce_in_order(xs, op, (chunk + 1) % xs.size(), /*wide=*/false);
}

std::vector<int64_t> offsets(const std::vector<int64_t>& counts) {
  std::vector<int64_t> at(counts.size() + 1, 0);
  for (size_t i = 0; i < counts.size(); ++i) at[i + 1] = at[i] + counts[i];
  return at;
}

}  // namespace

void TensorPart::begin() {
  if (!options_.checks) return;
  const UnaccountedMemory simulator;
  const at::NoGradGuard no_grad;  // parameters are communicated as they are
  const bool in_place = input_.defined() && output_.defined() && input_.is_alias_of(output_);
  // In place, the poison would destroy what the others have yet to read.
  if (in_place) input_ = input_.clone();
  if (input_.defined() && !in_place && input_.numel() > 0) {
    if (is_plain(input_)) {
      checksum_ = checksum_of(input_);
    } else if (input_.is_cuda()) {
      device_checksum_ = device_sum(input_);
      version_ = input_._version();
    }
  }
  if (output_.defined()) poison(output_);
}

void TensorPart::deliver(const Members& members, SharedResult& shared) {
  const UnaccountedMemory simulator;
  const at::NoGradGuard no_grad;
  fill(members, shared);
  if (options_.fault && output_.defined()) plant_fault();
}

void TensorPart::overwrite_input() {
  const at::NoGradGuard no_grad;
  if (input_.defined()) poison(input_);
}

bool TensorPart::inputs_intact() {
  const UnaccountedMemory simulator;
  const at::NoGradGuard no_grad;
  if (checksum_) return *checksum_ == checksum_of(input_);
  // Changes through LibTorch raise the version; what went around it shows in the bits. A buffer
  // that nobody else holds needs no second look.
  if (version_ && *version_ != input_._version()) return false;
  if (device_checksum_.defined() && options_.deferred && !is_exclusive(input_)) {
    options_.deferred->push_back({device_checksum_, device_sum(input_), options_.what});
  }
  return true;
}

void TensorPart::detach_inputs() {
  if (!input_.defined() || input_.numel() == 0) return;
  if (is_exclusive(input_) && !options_.memory_tracked) return;
  const at::NoGradGuard no_grad;
  const UnaccountedMemory simulator;
  input_ = input_.clone();
}

size_t TensorPart::source(size_t i, size_t members) const {
  if (!options_.fault || options_.fault->kind != FaultKind::kRotatePeers) return i;
  const auto n = static_cast<int64_t>(members);
  return static_cast<size_t>(((static_cast<int64_t>(i) + options_.fault->shift) % n + n) % n);
}

void TensorPart::plant_fault() {
  const Fault& fault = *options_.fault;
  const auto replace = [&](const Tensor& x) {
    output_.zero_();
    if (!x.defined()) return;
    copy_elements(output_, 0, x.contiguous(), 0, std::min(output_.numel(), x.numel()));
  };
  switch (fault.kind) {
    case FaultKind::kScale:
      output_.mul_(fault.factor);
      break;
    case FaultKind::kDrop:
      output_.zero_();
      break;
    case FaultKind::kRound:
      output_.copy_(output_.to(fault.dtype));
      break;
    case FaultKind::kStale:
      if (options_.previous_result.defined()) replace(options_.previous_result);
      break;
    case FaultKind::kEcho:
      replace(options_.own_last_sent);
      break;
    case FaultKind::kLocal:
      if (input_.defined() && input_.numel() == output_.numel()) replace(input_);
      break;
    default:
      break;  // planted elsewhere
  }
}

namespace {

class AllToAll final : public TensorPart {
 public:
  AllToAll(Tensor input, Tensor output, const std::vector<int64_t>& send,
           const std::vector<int64_t>& receive, size_t me, PartOptions options)
      : TensorPart(std::move(input), std::move(output), std::move(options)),
        sent_at_(offsets(send)),
        received_at_(offsets(receive)),
        me_(me) {}

 private:
  void fill(const Members& members, SharedResult&) override {
    std::vector<Tensor> segments;
    for (size_t i = 0; i < members.size(); ++i) {
      const auto& from = static_cast<const AllToAll&>(*members[source(i, members.size())]);
      const int64_t begin = from.sent_at_[me_];
      const int64_t expected = received_at_[i + 1] - received_at_[i];
      const int64_t count = std::min(from.sent_at_[me_ + 1] - begin, expected);
      if (output().is_cuda() && count == expected) {
        const Tensor& x = from.input();
        segments.push_back((x.dim() == 1 ? x : x.view({-1})).narrow(0, begin, count));
      } else {
        copy_elements(output(), received_at_[i], from.input(), begin, count);
      }
    }
    if (segments.empty()) return;
    Tensor flat = output().view({-1});
    at::cat_out(flat, segments, 0);  // one launch for all members
  }

  std::vector<int64_t> sent_at_, received_at_;
  size_t me_;
};

class AllGather final : public TensorPart {
 public:
  using TensorPart::TensorPart;

 private:
  void fill(const Members& members, SharedResult&) override {
    int64_t at = 0;
    for (size_t i = 0; i < members.size(); ++i) {
      const Tensor& from = part(members, source(i, members.size())).input();
      copy_elements(output(), at, from, 0, from.numel());
      at += from.numel();
    }
  }
};

class ReduceScatter final : public TensorPart {
 public:
  ReduceScatter(Tensor input, Tensor output, ReduceOperation op, size_t me, PartOptions options)
      : TensorPart(std::move(input), std::move(output), std::move(options)), op_(op), me_(me) {}

 private:
  void fill(const Members& members, SharedResult&) override {
    const int64_t n = output().numel();
    std::vector<Tensor> shares;
    for (size_t i = 0; i < members.size(); ++i) {
      shares.push_back(part(members, source(i, members.size()))
                           .input()
                           .view({-1})
                           .narrow(0, static_cast<int64_t>(me_) * n, n));
    }
    output().view({-1}).copy_(reduce_members(shares, op_, me_, options().order));
  }

  ReduceOperation op_;
  size_t me_;
};

class AllReduce final : public TensorPart {
 public:
  AllReduce(Tensor tensor, ReduceOperation op, PartOptions options)
      : TensorPart(tensor, tensor, std::move(options)), op_(op) {}

 private:
  void fill(const Members& members, SharedResult& shared) override {
    {
      std::lock_guard lock(shared.mutex);
      if (!shared.value) shared.value = std::make_shared<Tensor>(reduce_all(members));
    }
    output().view({-1}).copy_(*std::static_pointer_cast<Tensor>(shared.value));
  }

  Tensor reduce_all(const Members& members) const {
    std::vector<Tensor> flat;
    for (size_t i = 0; i < members.size(); ++i) flat.push_back(part(members, i).input().view({-1}));
    if (options().order == ReduceOrder::kRank) return reduce_members(flat, op_, 0, options().order);
    const auto n = static_cast<int64_t>(members.size());
    const int64_t chunk = (flat[0].numel() + n - 1) / n;
    std::vector<Tensor> chunks;
    for (int64_t c = 0, at = 0; at < flat[0].numel(); ++c, at += chunk) {
      std::vector<Tensor> shares;
      for (const Tensor& x : flat) {
        shares.push_back(x.narrow(0, at, std::min(chunk, x.numel() - at)));
      }
      chunks.push_back(reduce_members(shares, op_, static_cast<size_t>(c), options().order));
    }
    return chunks.empty() ? flat[0].clone() : at::cat(chunks, 0);
  }

  ReduceOperation op_;
};

class Broadcast final : public TensorPart {
 public:
  Broadcast(Tensor tensor, size_t root, size_t me, PartOptions options)
      : TensorPart(root == me ? tensor : Tensor(), root == me ? Tensor() : tensor,
                   std::move(options)),
        root_(root) {}

 private:
  void fill(const Members& members, SharedResult&) override {
    if (output().defined()) {
      const Tensor& from = part(members, root_).input();
      copy_elements(output(), 0, from, 0, from.numel());
    }
  }
  size_t root_;
};

// Send, receive and barrier: only a receive has something to fill.
class PointToPoint final : public TensorPart {
 public:
  using TensorPart::TensorPart;

 private:
  void fill(const Members& members, SharedResult&) override {
    if (!output().defined()) return;
    const Tensor& from = part(members, 0).input();
    copy_elements(output(), 0, from, 0, from.numel());
  }
};

}  // namespace

std::shared_ptr<TensorPart> all_to_all_part(Tensor input, Tensor output,
                                            const std::vector<int64_t>& send,
                                            const std::vector<int64_t>& receive, size_t me,
                                            PartOptions options) {
  return std::make_shared<AllToAll>(std::move(input), std::move(output), send, receive, me,
                                    std::move(options));
}
std::shared_ptr<TensorPart> all_gather_part(Tensor input, Tensor output, PartOptions options) {
  return std::make_shared<AllGather>(std::move(input), std::move(output), std::move(options));
}
std::shared_ptr<TensorPart> reduce_scatter_part(Tensor input, Tensor output, ReduceOperation op,
                                                size_t me, PartOptions options) {
  return std::make_shared<ReduceScatter>(std::move(input), std::move(output), op, me,
                                         std::move(options));
}
std::shared_ptr<TensorPart> all_reduce_part(Tensor tensor, ReduceOperation op,
                                            PartOptions options) {
  return std::make_shared<AllReduce>(std::move(tensor), op, std::move(options));
}
std::shared_ptr<TensorPart> broadcast_part(Tensor tensor, size_t root, size_t me,
                                           PartOptions options) {
  return std::make_shared<Broadcast>(std::move(tensor), root, me, std::move(options));
}
std::shared_ptr<TensorPart> send_part(Tensor tensor, PartOptions options) {
  return std::make_shared<PointToPoint>(std::move(tensor), Tensor(), std::move(options));
}
std::shared_ptr<TensorPart> recv_part(Tensor tensor, PartOptions options) {
  return std::make_shared<PointToPoint>(Tensor(), std::move(tensor), std::move(options));
}
std::shared_ptr<TensorPart> barrier_part() {
  return std::make_shared<PointToPoint>(Tensor(), Tensor(), PartOptions{});
}

}  // namespace shardproof::sim
