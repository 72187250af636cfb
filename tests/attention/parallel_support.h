// Joint attention dealt out to sequence-parallel ranks, and put together again.
#pragma once
#include "tests/catch.h"

#include <limits>
#include <vector>

#include "attention/sequence_parallel.h"
#include "tests/attention/attention_support.h"

namespace shardproof::tests {

// One mesh for each mode, of 4 ranks or fewer where that will do.
struct Mode {
  const char* name;
  comm::MeshShape mesh;
  plan::RingMode ring_mode;
};
const std::vector<Mode>& modes();

// Text and image in joint order; without text tokens the image alone.
struct JointOptions {
  int64_t text = 7, image = 13;
  plan::StreamPlacement text_placement = plan::StreamPlacement::kSharded;
  int64_t heads = 5, kv_heads = 5;
  plan::TokenSplit token_split = plan::TokenSplit::kUneven;
  plan::GradientConvention convention = plan::GradientConvention::kSumThenSlice;
};
plan::AttentionPlan joint_plan(const Mode& mode, const JointOptions& options = {});

// q, k, v and dout of all joint tokens; no mask.
Problem draw_joint(uint64_t seed, const plan::AttentionPlan& plan, int64_t batch = 2,
                   at::ScalarType dtype = at::kDouble, int64_t dim = 8);

constexpr double kPad = std::numeric_limits<double>::quiet_NaN();

// A rank's rows of one stream of a joint tensor [B,S,...]; pad rows hold `pad`.
at::Tensor local_rows(const plan::AttentionPlan& plan, const at::Tensor& joint, size_t stream,
                      int sp_rank, double pad = kPad);
// Leaves that require a gradient.
std::vector<attention::StreamQkv> local_inputs(const plan::AttentionPlan& plan, const Problem& p,
                                               int sp_rank);
Tensors local_cotangents(const plan::AttentionPlan& plan, const Problem& p, int sp_rank);

// Joint tensor [B,S,...] of what the ranks hold, by rank and stream, pads left out. Replicated
// streams: the ranks' sum, or rank 0's.
enum class Replicas { kSum, kFirst };
at::Tensor joined(const plan::AttentionPlan& plan, const std::vector<Tensors>& by_rank,
                  Replicas replicas);

attention::SequenceParallelAttention make_attention(const plan::AttentionPlan& plan,
                                                    const comm::Mesh& mesh,
                                                    at::ScalarType dtype = at::kDouble,
                                                    const char* backend = "auto");

// All ranks' results, in joint order.
struct JointResult {
  at::Tensor out, dq, dk, dv;
  std::vector<Tensors> outs;   // by rank and stream, as they came
  std::vector<Tensors> grads;  // by rank: dq, dk, dv of stream 0, of stream 1, ...
};
JointResult gather_results(const plan::AttentionPlan& plan, std::vector<Tensors> outs,
                           std::vector<Tensors> grads);
// Forward and backward on all ranks of `plan`, with the cotangents of local_cotangents().
JointResult run_joint(const plan::AttentionPlan& plan, const Problem& p);

void check_joint(const JointResult& result, const Solution& whole, double limit = 1e-13);

}  // namespace shardproof::tests
