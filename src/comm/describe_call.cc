#include "comm/describe_call.h"

#include <ATen/ATen.h>

#include "base/error.h"
#include "comm/tag.h"

namespace shardproof::comm {
namespace {

CollectiveCall call_of(CallKind kind, const at::Tensor& tensor) {
  CollectiveCall call;
  call.kind = kind;
  call.tag = current_tag();
  if (tensor.defined()) call.dtype = c10::toString(tensor.scalar_type());
  return call;
}

std::vector<int64_t> elements(const at::Tensor& tensor, const std::vector<int64_t>& rows,
                              int size) {
  if (rows.empty()) {
    return std::vector<int64_t>(static_cast<size_t>(size), tensor.numel() / size);
  }
  const int64_t per_row = tensor.size(0) == 0 ? 0 : tensor.numel() / tensor.size(0);
  std::vector<int64_t> counts;
  for (int64_t r : rows) counts.push_back(r * per_row);
  return counts;
}

}  // namespace

const char* reduce_name(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return "sum";
    case c10d::ReduceOp::AVG:
      return "avg";
    case c10d::ReduceOp::MAX:
      return "max";
    case c10d::ReduceOp::MIN:
      return "min";
    case c10d::ReduceOp::PRODUCT:
      return "product";
    default:
      bad_input(
          "reduce operation number {} is not supported; expected sum, avg, max, min or product",
          static_cast<int>(op.op_));
  }
}

CollectiveCall describe_all_to_all(const at::Tensor& output, const at::Tensor& input,
                                   const std::vector<int64_t>& output_rows,
                                   const std::vector<int64_t>& input_rows, int size) {
  CollectiveCall call = call_of(CallKind::kAllToAll, input);
  call.send = elements(input, input_rows, size);
  call.receive = elements(output, output_rows, size);
  return call;
}

CollectiveCall describe_all_gather(const at::Tensor& output, const at::Tensor& input, int size) {
  CollectiveCall call = call_of(CallKind::kAllGather, input);
  call.send = {input.numel()};
  call.receive = elements(output, {}, size);
  return call;
}

CollectiveCall describe_reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                       const c10d::ReduceOp& op, int size) {
  CollectiveCall call = call_of(CallKind::kReduceScatter, input);
  call.send = elements(input, {}, size);
  call.receive = {output.numel()};
  call.reduce_op = reduce_name(op);
  return call;
}

CollectiveCall describe_all_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  CollectiveCall call = call_of(CallKind::kAllReduce, tensor);
  call.send = call.receive = {tensor.numel()};
  call.reduce_op = reduce_name(op);
  return call;
}

CollectiveCall describe_broadcast(const at::Tensor& tensor, int root) {
  CollectiveCall call = call_of(CallKind::kBroadcast, tensor);
  call.send = call.receive = {tensor.numel()};
  call.root = root;
  return call;
}

CollectiveCall describe_send(const at::Tensor& tensor, int peer) {
  CollectiveCall call = call_of(CallKind::kSend, tensor);
  call.send = {tensor.numel()};
  call.peer = peer;
  return call;
}

CollectiveCall describe_receive(const at::Tensor& tensor, int peer) {
  CollectiveCall call = call_of(CallKind::kRecv, tensor);
  call.receive = {tensor.numel()};
  call.peer = peer;
  return call;
}

CollectiveCall describe_barrier() { return call_of(CallKind::kBarrier, {}); }

}  // namespace shardproof::comm
