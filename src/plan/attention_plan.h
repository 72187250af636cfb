// Which token, head and mask column a rank owns in sequence-parallel attention, as data.
//
// Code executes the plan; it decides no layout on the way. A plan can be printed, audited (every
// token and head exactly once) and, in verify, edited to plant a fault. No LibTorch.
//
// Words. A *stream* is a run of tokens with its own tensors (text, image). *Joint order*: all
// streams concatenated, unsharded. *Rank-major*: after the Ulysses all-to-all a rank holds, for
// each member of its Ulysses group in turn, that member's rows of every stream:
// [txt_0,img_0,txt_1,img_1,...], not [txt...,img...].
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "comm/mesh_shape.h"

namespace shardproof::plan {

struct Interval {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const Interval&) const = default;
};

enum class StreamPlacement {
  kSharded,    // each SP rank holds its rows
  kReplicated  // each SP rank holds all rows; attention works on this rank's rows of them and
               // gathers the output
};

// How a token count that sp does not divide is cut.
enum class TokenSplit {
  kUneven,  // [5,4,4]: the first ranks hold one more
  kPadded   // ceil(tokens/sp) rows on every rank, the rows behind the last token are pads
};

// How a query-head count that ulysses does not divide is cut.
enum class HeadSplit {
  kEven,    // refuse it
  kUneven,  // [2,2,1,1]
  kPadded   // heads of zeros up to the next multiple
};

// How the ring dimension meets the other ranks' keys and values.
enum class RingMode {
  kRotate,    // K, V travel around the ring, partial results are merged by their log-sum-exp
  kAllGather  // K, V are gathered; dK, dV are reduce-scattered
};

// What the backward of a gather over sp does with the cotangent of the gathered (replicated)
// tensor. All three agree for a loss that is the same on all SP ranks; for a rank-dependent loss
// only kSumThenSlice is a gradient.
enum class GradientConvention {
  kSliceThenScaleLoss,  // A: own slice; the loss is multiplied by sp elsewhere (diffusers,
                        // verl-omni)
  kSliceTimesSp,        // B: own slice x sp
  kSumThenSlice         // C: sum over sp, then own slice
};

struct StreamPlan {
  std::string name;
  int64_t tokens = 0;
  StreamPlacement placement = StreamPlacement::kSharded;
  std::vector<Interval> shards;     // per SP rank: its rows of the stream, pads excluded
  std::vector<int64_t> local_rows;  // per SP rank: rows of its tensors, pads at the end included
};

// Heads that one Ulysses rank works on.
struct HeadShard {
  Interval q;                    // heads >= AttentionPlan::q_heads are padding (zeros)
  Interval kv;                   // KV heads that travel to this rank
  std::vector<int64_t> kv_of_q;  // local KV head of each local query head; empty: grouped evenly
};

struct AttentionPlan {
  comm::MeshShape mesh;  // dp plays no part in attention
  int64_t q_heads = 0;
  int64_t kv_heads = 0;
  std::vector<StreamPlan> streams;  // in joint order
  std::vector<HeadShard> heads;     // per Ulysses rank
  // Per ring rank: joint-order tokens of its block in the order they are held (rank-major). Key
  // masks, given in joint order, are read through this.
  std::vector<std::vector<int64_t>> block_tokens;
  RingMode ring_mode = RingMode::kRotate;
  GradientConvention convention = GradientConvention::kSumThenSlice;

  int sp() const { return mesh.sp(); }
  int64_t joint_tokens() const;
  int64_t stream_offset(size_t stream) const;  // of the stream in joint order
  int64_t shard_rows(int sp_rank) const;       // rows of all streams of that rank, no pads
  int64_t block_rows(int ring_rank) const;     // rows that the ring rank's Ulysses group holds
};

struct AttentionPlanOptions {
  comm::MeshShape mesh;
  int64_t q_heads = 0;
  int64_t kv_heads = 0;
  struct Stream {
    std::string name;
    int64_t tokens = 0;
    StreamPlacement placement = StreamPlacement::kSharded;
  };
  std::vector<Stream> streams;
  TokenSplit token_split = TokenSplit::kUneven;
  HeadSplit head_split = HeadSplit::kEven;
  RingMode ring_mode = RingMode::kRotate;
  GradientConvention convention = GradientConvention::kSumThenSlice;
};

// Errors (kBadInput): counts below 1 (tokens below 0), q_heads not a multiple of kv_heads, heads
// that cannot be split in the chosen way.
AttentionPlan make_attention_plan(const AttentionPlanOptions& options);

// What is wrong with the plan's ownership, one sentence each; empty if every token of every stream
// and every head is owned exactly once, and masks are read where the tokens are held.
std::vector<std::string> audit(const AttentionPlan& plan);

// The plan as a table for people.
std::string to_table(const AttentionPlan& plan);

const char* to_string(TokenSplit value);
const char* to_string(HeadSplit value);
const char* to_string(RingMode value);
const char* to_string(GradientConvention value);

}  // namespace shardproof::plan
