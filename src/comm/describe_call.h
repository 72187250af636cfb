// Descriptions of c10d calls: one place for the recorder and the simulator, so that traces of every
// transport read alike.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <vector>

#include "base/collective_call.h"

namespace shardproof::comm {

// Each fills kind, tag (the thread's current one), dtype and sizes; group and number stay empty.
// `size` is the group's. Row splits as c10d has them: empty means even.
CollectiveCall describe_all_to_all(const at::Tensor& output, const at::Tensor& input,
                                   const std::vector<int64_t>& output_rows,
                                   const std::vector<int64_t>& input_rows, int size);
CollectiveCall describe_all_gather(const at::Tensor& output, const at::Tensor& input, int size);
CollectiveCall describe_reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                       const c10d::ReduceOp& op, int size);
CollectiveCall describe_all_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op);
CollectiveCall describe_broadcast(const at::Tensor& tensor, int root);
CollectiveCall describe_send(const at::Tensor& tensor, int peer);
CollectiveCall describe_receive(const at::Tensor& tensor, int peer);
CollectiveCall describe_barrier();

// "sum", "avg", "max", "min", "product"; Errors (kBadInput): another operation.
const char* reduce_name(const c10d::ReduceOp& op);

}  // namespace shardproof::comm
