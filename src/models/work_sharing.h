// How a mesh shares a model's work: what each sequence-parallel rank holds, computes and sends, and
// what of it is waste. From plans alone; no weights, no tensors.
#pragma once
#include <string>
#include <vector>

#include "models/workload.h"

namespace shardproof::models {

// What a rank sends to others in one self-attention (the first kind that the model has), bytes.
// 16-bit tensors; sums of gradients travel in fp32.
struct AttentionTraffic {
  int64_t forward = 0;
  int64_t backward = 0;
};
AttentionTraffic attention_traffic(const plan::AttentionPlan& plan, int sp_rank, int64_t samples,
                                   int64_t head_dim);

struct RankShare {
  std::vector<int64_t> tokens;  // own rows of each stream of the plan
  std::vector<int64_t> rows;  // rows that linear layers see: pads and replicas of others' included
  plan::Interval heads;       // those behind the last real one are zeros
  double flops = 0;           // of a forward
  AttentionTraffic traffic;   // a layer
};

struct WorkSharing {
  plan::AttentionPlan plan;  // of the first self-attention
  Workload work;             // of one replica, without parallelism
  int64_t layers = 0;        // with this attention
  std::vector<RankShare> ranks;
  std::vector<std::string> warnings;

  double slowest() const;  // FLOPs of the rank with the most
  double total() const;
  double mean() const;
  int64_t pad_rows(int sp_rank) const;
  int64_t padded_heads(int sp_rank) const;
};

// One replica's ranks; `samples` are those of one replica. Errors (kBadInput): as stream_tokens()
// and make_attention_plan().
WorkSharing share_work(const Transformer& model, const SampleSize& size, int64_t samples,
                       const comm::MeshShape& mesh, const ParallelOptions& options);

}  // namespace shardproof::models
