#include "verify/mutants/attention_mutants.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "verify/mutants/altered_local.h"

namespace shardproof::verify {
namespace {

using at::Tensor;
using attention::AttentionGradients;
using attention::AttentionOutput;
using attention::PartialAttention;
using Local = AttentionSubject::Local;
using Planted = std::optional<AttentionSubject>;

bool rotates(const AttentionCase& c) {
  return c.mesh.ring > 1 && c.ring_mode == plan::RingMode::kRotate;
}

// A local attention whose results pass through functions.
class Altered final : public AlteredLocal {
 public:
  using Forward = std::function<AttentionOutput(AttentionOutput)>;
  using Backward = std::function<AttentionGradients(AttentionGradients)>;
  Altered(Local inner, Forward forward, Backward backward)
      : AlteredLocal(std::move(inner)),
        forward_(std::move(forward)),
        backward_(std::move(backward)) {}
  AttentionOutput forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask,
                          double scale) const override {
    AttentionOutput result = inner().forward(q, k, v, mask, scale);
    return forward_ ? forward_(std::move(result)) : result;
  }
  AttentionGradients backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                              const Tensor& out, const Tensor& lse, const Tensor& mask,
                              double scale) const override {
    AttentionGradients result = inner().backward(dout, q, k, v, out, lse, mask, scale);
    return backward_ ? backward_(std::move(result)) : result;
  }

 private:
  Forward forward_;
  Backward backward_;
};

Planted alter(const Altered::Forward& forward, const Altered::Backward& backward) {
  AttentionSubject subject;
  subject.wrap_local = [=](Local local, int) -> Local {
    return std::make_shared<Altered>(std::move(local), forward, backward);
  };
  return subject;
}

// K and V exchanged in the backward only.
class SwappedBackward final : public AlteredLocal {
 public:
  using AlteredLocal::AlteredLocal;
  AttentionGradients backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                              const Tensor& out, const Tensor& lse, const Tensor& mask,
                              double scale) const override {
    return inner().backward(dout, q, v, k, out, lse, mask, scale);
  }
};

Planted swap_kv(const AttentionCase&) { return alter_local<SwappedBackward>(); }

Planted ignore_lse(const AttentionCase& c) {
  if (!rotates(c)) return {};
  AttentionSubject subject;
  subject.merge = [](const PartialAttention& so_far, const AttentionOutput& block) {
    PartialAttention right = attention::merge_block(so_far, block);
    if (so_far.out.defined()) right.out = (so_far.out + block.out) * 0.5;
    return right;
  };
  return subject;
}

// The arithmetic of the merge in the blocks' own 16-bit type; in fp32 and fp64 one step lower.
Planted merge_in_low_precision(const AttentionCase& c) {
  if (!rotates(c)) return {};
  const at::ScalarType low = c.dtype == at::kDouble  ? at::kFloat
                             : c.dtype == at::kFloat ? at::kBFloat16
                                                     : c.dtype;
  AttentionSubject subject;
  subject.merge = [low](const PartialAttention& so_far, const AttentionOutput& block) {
    PartialAttention right = attention::merge_block(so_far, block);
    if (!so_far.out.defined()) return right;
    const auto weight = [&](const Tensor& lse) {
      const Tensor w = at::exp(lse - right.lse);
      return at::nan_to_num(w, 0.0).transpose(1, 2).unsqueeze(-1).to(low);
    };
    const Tensor merged =
        so_far.out.to(low) * weight(so_far.lse) + block.out.to(low) * weight(block.lse);
    right.out = merged.to(right.out.scalar_type());
    return right;
  };
  return subject;
}

Planted fault(sim::Fault f) {
  AttentionSubject subject;
  subject.faults.push_back(std::move(f));
  return subject;
}

Planted stale_kv(const AttentionCase& c) {
  if (!rotates(c)) return {};
  return fault({.kind = sim::FaultKind::kEcho, .tag = "kv.rotate'"});
}

Planted rotate_heads(const AttentionCase& c) {
  if (c.mesh.ulysses == 1) return {};
  return fault({.kind = sim::FaultKind::kRotatePeers, .tag = "out.head_to_seq"});
}

Planted omit_wait(const AttentionCase& c) {
  if (c.mesh.sp() == 1) return {};
  const char* tag = c.mesh.ulysses > 1 ? "qkv.seq_to_head" : rotates(c) ? "kv.rotate" : "kv.gather";
  return fault({.kind = sim::FaultKind::kSkipWait, .tag = tag});
}

Planted mask_in_stream_order(const AttentionCase& c) {
  if (c.mask == MaskKind::kNone || c.text == 0) return {};
  AttentionSubject subject;
  subject.edit_plan = [](plan::AttentionPlan& p) {
    for (auto& tokens : p.block_tokens) std::sort(tokens.begin(), tokens.end());
  };
  return subject;
}

// Every rank takes floor(tokens/sp) rows; whatever is left belongs to nobody.
Planted drop_tail(const AttentionCase& c) {
  if (c.text % c.mesh.sp() == 0 && c.image % c.mesh.sp() == 0) return {};
  AttentionSubject subject;
  subject.edit_plan = [](plan::AttentionPlan& p) {
    const int u = p.mesh.ulysses;
    for (auto& tokens : p.block_tokens) tokens.clear();
    for (int r = 0; r < p.sp(); ++r) {
      for (size_t s = 0; s < p.streams.size(); ++s) {
        plan::Interval& rows = p.streams[s].shards[static_cast<size_t>(r)];
        rows.end = rows.begin + std::min(rows.size(), p.streams[s].tokens / p.sp());
        for (int64_t t = rows.begin; t < rows.end; ++t) {
          p.block_tokens[static_cast<size_t>(r / u)].push_back(p.stream_offset(s) + t);
        }
      }
    }
  };
  return subject;
}

// Pad rows take part as if they were tokens.
Planted unmask_pads(const AttentionCase& c) {
  const bool has_pads = c.token_split == plan::TokenSplit::kPadded && c.text == 0 &&
                        c.image % c.mesh.sp() != 0 && c.mask == MaskKind::kNone;
  if (!has_pads) return {};
  AttentionSubject subject;
  subject.edit_plan = [](plan::AttentionPlan& p) {
    plan::StreamPlan& image = p.streams.back();
    const int64_t rows = image.local_rows[0];
    image.tokens = rows * p.sp();
    for (size_t r = 0; r < image.shards.size(); ++r) {
      const auto begin = static_cast<int64_t>(r) * rows;
      image.shards[r] = {begin, begin + rows};
    }
  };
  return subject;
}

Planted scale_gradients(const AttentionCase& c) {
  const double factor = c.dtype == at::kDouble || c.dtype == at::kFloat ? 0.999 : 0.9;
  return alter({}, [factor](const AttentionGradients& g) {
    return AttentionGradients{g.dq * factor, g.dk * factor, g.dv * factor};
  });
}

Planted zero_dq(const AttentionCase& c) {
  AttentionSubject subject;
  const int rank = c.mesh.world() - 1;
  subject.wrap_local = [rank](Local local, int world_rank) -> Local {
    if (world_rank != rank) return local;
    return std::make_shared<Altered>(std::move(local), Altered::Forward{},
                                     [](const AttentionGradients& g) {
                                       return AttentionGradients{at::zeros_like(g.dq), g.dk, g.dv};
                                     });
  };
  return subject;
}

Planted transpose_lse(const AttentionCase& c) {
  if (c.text > 0 || c.image * c.mesh.ulysses != c.heads * c.mesh.ring) return {};
  return alter(
      [](AttentionOutput o) {
        if (o.lse.size(1) != o.lse.size(2)) return o;
        return AttentionOutput{o.out, o.lse.transpose(1, 2).contiguous()};
      },
      {});
}

}  // namespace

const std::vector<AttentionMutant>& attention_mutants() {
  static const std::vector<AttentionMutant> mutants = {
      {"lse-ignored", "ring blocks are averaged without their log-sum-exp", {"output"}, ignore_lse},
      {"merge-low-precision",
       "ring blocks are merged in 16-bit arithmetic",
       {"output"},
       merge_in_low_precision},
      {"stale-kv",
       "every backward step of the ring uses the local K, V block",
       {"q:grad"},
       stale_kv},
      {"kv-swapped", "the backward takes K for V and V for K", {"q:grad"}, swap_kv},
      {"heads-rotated",
       "output heads are taken from the neighbour's group",
       {"output"},
       rotate_heads},
      {"mask-stream-order",
       "the mask is read in stream order, tokens are rank-major",
       {"output"},
       mask_in_stream_order},
      {"tail-dropped", "tokens that sp does not divide are dropped", {"output"}, drop_tail},
      {"pads-unmasked", "pad rows take part in attention", {"output"}, unmask_pads},
      {"gradients-scaled",
       "all gradients times 0.999 (fp64, fp32) or 0.9 (16 bits)",
       {"q:grad"},
       scale_gradients},
      {"dq-zero", "dq of one rank is zero", {"q:grad"}, zero_dq},
      {"lse-transposed",
       "[B,S,H] taken for [B,H,S] where S == H",
       {"output", "lse"},
       transpose_lse},
      {"wait-omitted", "a result is read before its wait", {"output"}, omit_wait},
  };
  return mutants;
}

}  // namespace shardproof::verify
