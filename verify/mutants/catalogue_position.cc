// P: positions, masks, padding.
#include <ATen/ATen.h>

#include "verify/mutants/altered_context.h"
#include "verify/mutants/planting.h"

namespace shardproof::verify {
namespace {

using at::Tensor;
using attention::AttentionOutput;
using attention::PartialAttention;

// Tables of positions are the tensors that are cut along their first dimension.
ModelSubject positions(std::function<Tensor(const Tensor& rows, const Tensor& whole)> wrong) {
  return in_context<ModelSubject>([wrong](AlteredContext& context, int) {
    context.edit_rows = [wrong](const Tensor& rows, const Tensor& whole, const plan::StreamPlan&,
                                int64_t dim) {
      return dim == 0 && whole.dim() == 2 ? wrong(rows, whole) : rows;
    };
  });
}

Tensor of_the_neighbour(const Tensor& rows, const Tensor& whole) {
  return whole.roll(rows.size(0), 0).narrow(0, 0, rows.size(0)).clone();
}
Tensor from_zero(const Tensor& rows, const Tensor& whole) {
  return whole.narrow(0, 0, rows.size(0));
}

// lse - logsigmoid(lse - block_lse), right for finite numbers: -inf - -inf for a query that has
// seen no key yet.
AttentionSubject merge_without_empty_blocks() {
  AttentionSubject subject;
  subject.merge = [](const PartialAttention& so_far, const AttentionOutput& block) {
    if (!so_far.out.defined()) return attention::merge_block(so_far, block);
    const Tensor share =
        at::sigmoid(block.lse - so_far.lse).transpose(1, 2).unsqueeze(-1).to(so_far.out.dtype());
    return PartialAttention{so_far.out - share * (so_far.out - block.out),
                            so_far.lse - at::log_sigmoid(so_far.lse - block.lse)};
  };
  return subject;
}

TrainingSubject loss_of_own_shard() {
  TrainingSubject subject;
  subject.edit_loss = [](const Tensor& loss, const TrainingSubject::LossPlace&) {
    return loss * 0.5;
  };
  return subject;
}

}  // namespace

std::vector<Mutant> position_mutants() {
  const ModelSpot u2{"dp1.ring1.ulysses2"}, no_sp{"dp2.ring1.ulysses1"};
  const AttentionSpot ring{"dp1.ring2.ulysses1"},
      one_empty{"dp1.ring2.ulysses1", "b2.t8.i24.h4.d16.emptyrank"},
      padded{"dp1.ring1.ulysses2", "b2.i15.h4.d16.tokenpad"};
  return {
      {.id = "P1",
       .source = "NVIDIA/Megatron-LM#1612",
       .kind = "M-ROPE",
       .text = "a rank takes another rank's slice of the table of positions",
       .cause = "layout",
       .first_wrong = {"block.0.*"},
       .plants = plants(u2, positions(of_the_neighbour))},
      {.id = "P2",
       .source = "thunlp/Seq1F1B#6",
       .kind = "M-ROPE",
       .text = "positions of every rank start at zero",
       .cause = "layout",
       .first_wrong = {"block.0.*"},
       .plants = plants(u2, positions(from_zero)),
       .innocent = {plant(no_sp, positions(from_zero))}},
      {.id = "P4",
       .source = "NVIDIA/Megatron-LM#1764",
       .kind = "M-EMPTYRANK",
       .text = "all keys of one rank are masked: 0/0",
       .cause = "unwritten",
       .first_wrong = {"output", "lse"},
       .plants = plants(one_empty, merge_without_empty_blocks()),
       .innocent = {plant(ring, merge_without_empty_blocks())}},
      {.id = "P5",
       .source = "NVIDIA-NeMo/Megatron-Bridge#3117",
       .kind = "M-PADDING",
       .text = "NaN in padding reaches what is computed",
       .cause = "ownership",
       .first_wrong = {"output"},
       .plants = plants(padded, "pads-unmasked")},
      {.id = "P6",
       .source = "deepspeedai/DeepSpeed#5419",
       .kind = "M-SCALE",
       .text = "each rank's loss of its own tokens is averaged as if it were a whole one",
       .cause = "scale",
       .first_wrong = {"*/loss"},
       .plants =
           plants(TrainingSpot{"dp1.ring1.ulysses2.fsdp2"}.with("perrank"), loss_of_own_shard())},
  };
}

}  // namespace shardproof::verify
