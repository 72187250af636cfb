// F: parameters that are frozen, unused, or kept whole.
#include <ATen/ATen.h>

#include "verify/mutants/altered_context.h"
#include "verify/mutants/planting.h"

namespace shardproof::verify {
namespace {

using at::Tensor;

// Micro-batches before the last leave no gradient.
TrainingSubject last_micro_batch_only() {
  TrainingSubject subject;
  subject.edit_loss = [](const Tensor& loss, const TrainingSubject::LossPlace& place) {
    return place.micro_batch < 2 ? loss * 0 + loss.detach() : loss;
  };
  return subject;
}

ModelSubject query_path_cut() {
  return in_context<ModelSubject>([](AlteredContext& context, int) {
    context.wrap_attention = [](const models::JointAttention& right) {
      return [right](std::vector<attention::StreamQkv> streams, const Tensor& mask) {
        for (auto& s : streams) s.q = s.q.detach();
        return right(streams, mask);
      };
    };
  });
}

// The output is right; in the backward each rank gets the rows of its cotangent that are another's.
ModelSubject cotangents_of_others() {
  return in_context<ModelSubject>([](AlteredContext& context, int) {
    context.edit_gathered = [](const Tensor& whole, const Tensor& own, const plan::StreamPlan&) {
      const Tensor moved = whole.roll(own.size(1), 1);
      return whole.detach() + (moved - moved.detach());
    };
  });
}

}  // namespace

std::vector<Mutant> parameter_mutants() {
  return {
      {.id = "F1",
       .source = "pytorch/pytorch#196996",
       .kind = "M-ACCUM, M-UNUSED",
       .text = "gradients of micro-batches before the last are lost",
       .cause = "accumulation",
       .first_wrong = {"*:grad"},
       .forward_right = true,
       .plants =
           plants(TrainingSpot{"dp2.ring1.ulysses1.fsdp2"}.with("acc3"), last_micro_batch_only())},
      {.id = "F2",
       .source = "verl-project/verl#7458",
       .kind = "M-MEMLEAK",
       .text = "accumulated gradients are kept whole, in fp32",
       .inexpressible = "no number is wrong, only memory: planted in "
                        "tests/fsdp/training_memory_test.cc, which fails then"},
      {.id = "F4",
       .source = "meta-pytorch/torchforge#592",
       .kind = "M-FROZEN",
       .text = "the path of a gradient is cut",
       .cause = "missing-gradient",
       .first_wrong = {"*q*:grad"},
       .forward_right = true,
       .plants = plants(ModelSpot{"dp1.ring1.ulysses2"}, query_path_cut())},
      {.id = "F5",
       .source = "facebookresearch/fairscale#605",
       .kind = "M-FROZEN",
       .text = "a parameter is frozen by leaving its gradient away, which flat parameters undo",
       .inexpressible = "there are no flat parameters here, and frozen ones are no leaves: the "
                        "optimizer is not told of them"},
      {.id = "F6",
       .source = "deepspeedai/DeepSpeed#7672",
       .kind = "M-GROUP",
       .text = "the adjoint of a gather takes shares of other members of the group",
       .cause = "backward",
       .first_wrong = {"*:grad"},
       .forward_right = true,
       .plants = plants(ModelSpot{"dp1.ring1.ulysses2"}, cotangents_of_others())},
  };
}

}  // namespace shardproof::verify
