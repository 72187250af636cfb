// One attention check as a value, and its id: the id holds everything, so that `--case ID` runs
// exactly this case.
//
//   attention/joint/hybrid/dp1.ring2.ulysses2/bf16/b2.t8.i24.h4.kv4.d16.ragged.textrep.C#17
//
// subject: self (image tokens only) or joint (text and image). mode: what the mesh makes of it,
// ulysses, ring, allgather (a ring dimension that gathers K, V), hybrid, hybrid_allgather; at sp =
// 1 local. The variant is a list of words joined by '.', in any order; what is not said has its
// default.
#pragma once
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "plan/attention_plan.h"

namespace shardproof::verify {

enum class MaskKind {
  kNone,
  kRagged,     // a prefix of the text (of all tokens without text), another length per sample
  kScattered,  // random keys; at least one is left
  kOneKey,     // all but one key masked
  kEmptyRank   // every key that one SP rank holds
};

struct AttentionCase {
  std::string suite = "attention";
  std::string golden;  // name of the golden that the data come from; empty: drawn from the seed
  comm::MeshShape mesh;
  c10::ScalarType dtype = c10::ScalarType::Float;
  int64_t batch = 2;                // b<n>; per data-parallel replica
  int64_t text = 0;                 // t<n>
  int64_t image = 24;               // i<n>
  int64_t heads = 4;                // h<n>
  int64_t kv_heads = 4;             // kv<n>; default: as heads
  int64_t head_dim = 16;            // d<n>
  MaskKind mask = MaskKind::kNone;  // ragged, scattered, onekey, emptyrank
  plan::StreamPlacement text_placement = plan::StreamPlacement::kSharded;  // textrep
  plan::TokenSplit token_split = plan::TokenSplit::kUneven;                // tokenpad
  plan::HeadSplit head_split = plan::HeadSplit::kEven;                     // headuneven, headpad
  plan::RingMode ring_mode = plan::RingMode::kRotate;                      // by the mode
  plan::GradientConvention convention = plan::GradientConvention::kSumThenSlice;  // A, B, C
  bool strided = false;          // strided: q, k, v are views of one tensor
  std::string backend = "auto";  // @<name>
  uint64_t seed = 1;

  int64_t tokens() const { return text + image; }
  std::string subject() const { return text > 0 ? "joint" : "self"; }
  std::string mode() const;
  std::string id() const;
  // Errors (kBadInput): what cannot be read, with what was expected.
  static AttentionCase parse(std::string_view id);

  // The plan that the product is asked for. Errors (kBadInput): an impossible combination.
  plan::AttentionPlan make_plan() const;
  // Token counts that sp divides, heads that ulysses divides, and no replication of KV heads.
  bool is_even() const;
};

}  // namespace shardproof::verify
