// The two all-to-alls of Ulysses (arXiv:2309.14509): from "my tokens, all heads" to "all tokens of
// my Ulysses group, my heads" and back. Each is the adjoint of the other.
//
// Messages are token-major, [tokens, B, heads, D], all parts (q, k, v) of a token side by side:
// what arrives from all members is then one dense tensor whose parts are views, and what is sent
// back is cut along dimension 0. One message carries all parts.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

#include "comm/communicator.h"
#include "plan/attention_plan.h"

namespace shardproof::attention {

// Which heads of each part go to which Ulysses rank.
struct HeadRoute {
  struct Part {
    int64_t heads = 0;                  // of the whole part; heads beyond are padding
    std::vector<plan::Interval> owned;  // per Ulysses rank
  };
  std::vector<Part> parts;

  int64_t heads_of(int ulysses_rank) const;  // sum over parts
};
HeadRoute query_route(const plan::AttentionPlan& plan);  // one part: q, out, dout
HeadRoute qkv_route(const plan::AttentionPlan& plan);    // q, k, v

class Ulysses {
 public:
  // `sp_rank` is this rank's index in the SP group. The references must outlive the object.
  Ulysses(const plan::AttentionPlan& plan, const comm::Communicator& group, int sp_rank);

  // parts[p][s]: stream s of part p, [B, rows of this rank without pads, heads, D].
  // Returns per part [B, block rows (rank-major), this rank's heads, D].
  std::vector<at::Tensor> seq_to_head(const HeadRoute& route,
                                      const std::vector<std::vector<at::Tensor>>& parts) const;

  // parts[p]: [B, block rows, this rank's heads, D]. Returns per part [B, this rank's rows of all
  // streams, all heads, D]. Where several ranks hold the same head (KV heads that were replicated),
  // their values are summed, in fp32 or better.
  std::vector<at::Tensor> head_to_seq(const HeadRoute& route, std::vector<at::Tensor> parts) const;

 private:
  std::vector<int64_t> rows_of_members() const;

  const plan::AttentionPlan& plan_;
  const comm::Communicator& group_;
  int first_member_;  // SP rank of the group's first member
  int me_;            // index in the Ulysses group
};

}  // namespace shardproof::attention
