// A: attention and its backward.
#include <ATen/ATen.h>

#include "attention/cross_attention.h"
#include "verify/mutants/altered_context.h"
#include "verify/mutants/altered_local.h"
#include "verify/mutants/attention_mutants.h"
#include "verify/mutants/planting.h"

namespace shardproof::verify {
namespace {

using at::Tensor;
using attention::AttentionGradients;
using attention::StreamQkv;

// The block's own log-sum-exp and output in the backward, where those of all blocks are due.
class OwnLse final : public AlteredLocal {
 public:
  using AlteredLocal::AlteredLocal;
  AttentionGradients backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                              const Tensor& out, const Tensor& lse, const Tensor& mask,
                              double scale) const override {
    const attention::AttentionOutput own = inner().forward(q, k, v, mask, scale);
    return inner().backward(dout, q, k, v, own.out, own.lse, mask, scale);
  }
};

// A kernel whose backward is off for the last key where keys are masked.
class MaskedBackward final : public AlteredLocal {
 public:
  using AlteredLocal::AlteredLocal;
  AttentionGradients backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                              const Tensor& out, const Tensor& lse, const Tensor& mask,
                              double scale) const override {
    AttentionGradients g = inner().backward(dout, q, k, v, out, lse, mask, scale);
    if (mask.defined()) g.dk.narrow(1, g.dk.size(1) - 1, 1).mul_(1.5);
    return g;
  }
};

// A last digit of dq that is not the one of other runs.
class Restless final : public AlteredLocal {
 public:
  using AlteredLocal::AlteredLocal;
  AttentionGradients backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                              const Tensor& out, const Tensor& lse, const Tensor& mask,
                              double scale) const override {
    AttentionGradients g = inner().backward(dout, q, k, v, out, lse, mask, scale);
    const double unit = g.dq.scalar_type() == at::kDouble ? 1e-15 : 6e-3;
    g.dq.view(-1).narrow(0, 0, 1).mul_(1 + unit);
    return g;
  }
};

// Bits of an attention are judged on a CPU, where kernels promise them.
std::vector<Plant> on_cpu(std::vector<Plant> plants) {
  for (Plant& plant : plants) plant.cpu_only = true;
  return plants;
}

ModelSubject in_attention(std::function<models::JointAttention(models::JointAttention)> wrap) {
  return in_context<ModelSubject>(
      [wrap](AlteredContext& context, int) { context.wrap_attention = wrap; });
}

// Every rank attends to its own tokens, as without sequence parallelism.
ModelSubject own_tokens_only() {
  return in_attention([](const models::JointAttention&) {
    return [](const std::vector<StreamQkv>& streams, const Tensor&) {
      std::vector<Tensor> parts[3];
      for (const StreamQkv& s : streams) {
        parts[0].push_back(s.q), parts[1].push_back(s.k), parts[2].push_back(s.v);
      }
      const Tensor q = at::cat(parts[0], 1);
      const Tensor out = attention::cross_attention(
          attention::make_local_attention("auto", q.device(), q.scalar_type(), false), q,
          at::cat(parts[1], 1), at::cat(parts[2], 1));
      attention::SequenceParallelOutput result;
      int64_t row = 0;
      for (const StreamQkv& s : streams) {
        result.streams.push_back(out.narrow(1, row, s.q.size(1)));
        row += s.q.size(1);
      }
      return result;
    };
  });
}

// The backward has no gradient for v, as when a function's adjoint lags behind its arguments.
ModelSubject without_gradient_of_v() {
  return in_attention([](const models::JointAttention& right) {
    return [right](std::vector<StreamQkv> streams, const Tensor& mask) {
      for (StreamQkv& s : streams) s.v = s.v.detach();
      return right(streams, mask);
    };
  });
}

// Gradients of norms' weights with more than one sample.
TrainingSubject norms_with_batch(int batch) {
  TrainingSubject subject;
  subject.edit_gradients = [batch](const std::vector<fsdp::TrainedTensor>& tensors, int) {
    for (const fsdp::TrainedTensor& t : tensors) {
      if (batch > 1 && t.name.find("norm_k") != std::string::npos) t.grad.mul_(16);
    }
  };
  return subject;
}

}  // namespace

std::vector<Mutant> attention_bugs() {
  const AttentionSpot ring{"dp1.ring4.ulysses1"}, ulysses{"dp1.ring1.ulysses2"},
      masked{"dp1.ring1.ulysses2", "b2.t8.i24.h4.d16.ragged"};
  const AttentionSpot square{"dp1.ring2.ulysses1", "b2.i8.h4.d16"};
  const ModelSpot model{"dp1.ring1.ulysses2"};
  TrainingSpot two_samples{"dp1.ring1.ulysses2.fsdp2"};
  two_samples.batch = 2;
  return {
      {.id = "A1",
       .source = "huggingface/diffusers#14265",
       .kind = "M-STALEKV",
       .text = "every backward step of the ring uses the K, V of its first",
       .cause = "backward",
       .first_wrong = {"q:grad"},
       .forward_right = true,
       .plants = plants(ring, "stale-kv")},
      {.id = "A2",
       .source = "NVIDIA-NeMo/Automodel#3157",
       .kind = "M-STALEKV, M-LAYOUT",
       .text = "the backward takes K and V in another layout than the forward",
       .cause = "backward",
       .first_wrong = {"q:grad"},
       .forward_right = true,
       .plants = plants(ulysses, "kv-swapped")},
      {.id = "A4",
       .source = "huggingface/diffusers#12563",
       .kind = "M-BYPASS",
       .text = "the kernel's path ignores the parallel configuration: ranks see their own tokens",
       .cause = "bypass",
       .first_wrong = {"block.0.*"},
       .plants = plants(model, own_tokens_only())},
      {.id = "A5",
       .source = "ByteDance-Seed/VeOmni#419",
       .kind = "M-ORDER",
       .text = "the backward of K's norm runs before its all-to-all has been waited for",
       .cause = "missing-wait",
       .first_wrong = {"*:grad"},
       .forward_right = true,
       .plants = plants(model, with_faults<ModelSubject>(
                                   {fault(sim::FaultKind::kSkipWait, "*attn/qkv.seq_to_head'")}))},
      {.id = "A6",
       .source = "NVIDIA/TransformerEngine#1557",
       .kind = "M-RINGBWD",
       .text = "a ring step's backward uses its block's own log-sum-exp",
       .cause = "backward",
       .first_wrong = {"q:grad"},
       .forward_right = true,
       .plants = plants(ring, alter_local<OwnLse>()),
       .innocent = {plant(ulysses, alter_local<OwnLse>())}},
      {.id = "A8",
       .source = "NVIDIA/TransformerEngine#3333",
       .kind = "M-BWDKERNEL",
       .text = "a kernel's backward is wrong where keys are masked",
       .cause = "backward",
       .first_wrong = {"k:grad"},
       .forward_right = true,
       .plants = plants(masked, alter_local<MaskedBackward>()),
       .innocent = {plant(ulysses, alter_local<MaskedBackward>())}},
      {.id = "A9",
       .source = "zhuzilin/ring-flash-attention#42",
       .kind = "M-LOWPREC-MERGE",
       .text = "ring blocks are merged in 16-bit arithmetic (blocks that come back in 16 bits and "
               "are merged in fp32 are what flash attention returns: no mistake)",
       .cause = "precision",
       .first_wrong = {"output"},
       .plants = plants(AttentionSpot{"dp1.ring8.ulysses1", "b2.t16.i112.h4.d16"},
                        "merge-low-precision")},
      {.id = "A10",
       .source = "zhuzilin/ring-flash-attention#46",
       .kind = "M-LSELAYOUT",
       .text = "the log-sum-exp is read as [B,S,H] where it is [B,H,S]",
       .cause = "layout",
       .first_wrong = {"output", "lse"},
       .plants = plants(square, "lse-transposed")},
      {.id = "A12",
       .source = "feifeibear/long-context-attention#149",
       .kind = "M-ADJOINT",
       .text = "the backward returns fewer gradients than the forward has arguments",
       .cause = "missing-gradient",
       .first_wrong = {"*:grad"},
       .forward_right = true,
       .plants = plants(model, without_gradient_of_v())},
      {.id = "A13",
       .source = "fla-org/flash-linear-attention#955",
       .kind = "M-PADDING",
       .text = "with more than one sample the gradient of a norm's weight is 16 times too large",
       .cause = "scale",
       .first_wrong = {"*norm_k*:grad"},
       .forward_right = true,
       .plants = plants(two_samples, norms_with_batch(2)),
       .innocent = {plant(TrainingSpot{"dp1.ring1.ulysses2.fsdp2"}, norms_with_batch(1))}},
      {.id = "A14",
       .source = "Dao-AILab/flash-attention#2244",
       .kind = "M-NONDET",
       .text = "dq differs in a last digit between runs that should be deterministic",
       .cause = "nondeterminism",
       .first_wrong = {"bitwise"},
       .forward_right = true,
       .plants = on_cpu(plants(ulysses, alter_local<Restless>()))},
  };
}

}  // namespace shardproof::verify
