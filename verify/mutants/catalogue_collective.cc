// H, X: calls in another order, left out, of other sizes; buffers used too early.
#include <ATen/ATen.h>

#include "verify/mutants/planting.h"

namespace shardproof::verify {
namespace {

using sim::FaultKind;

TrainingSubject training(FaultKind kind, const char* tag, int64_t occurrence = -1) {
  return with_faults<TrainingSubject>({fault(kind, tag, {.rank = 1, .occurrence = occurrence})});
}

// One rank is given other inputs than its SP neighbours.
ModelSubject on_rank_1(std::function<void(models::TransformerInputs&)> edit) {
  ModelSubject subject;
  subject.edit_inputs = [edit](models::TransformerInputs& inputs, int rank) {
    if (rank == 1) edit(inputs);
  };
  return subject;
}

void one_token_fewer(models::TransformerInputs& in) {
  in.encoder_hidden_states = in.encoder_hidden_states.narrow(1, 0, 7);
}
void one_sample_fewer(models::TransformerInputs& in) {
  for (auto& [name, x] : in.tensors()) {
    if (models::TransformerInputs::has_samples(name)) in[name] = x.narrow(0, 0, 1);
  }
  in.img_shapes.resize(1);
}

}  // namespace

std::vector<Mutant> collective_mutants() {
  const TrainingSpot two{"dp1.ring1.ulysses2.fsdp2"};
  TrainingSpot two_blocks = two;
  two_blocks.layers = 2;
  TrainingSpot two_steps = two;
  two_steps.steps = 2;
  const ModelSpot model{"dp1.ring1.ulysses2"};
  const AttentionSpot ring{"dp1.ring2.ulysses1"};
  const std::vector<std::string> calls = {"trace", "deadlock"};
  return {
      {.id = "H1",
       .source = "ByteDance-Seed/VeOmni#979",
       .kind = "M-COLLORDER",
       .text = "one rank's recomputation makes its calls in another order",
       .cause = "collective-order",
       .first_wrong = calls,
       .plants = plants(two_blocks.with("recompute"),
                        training(FaultKind::kHoldBack, "*weights.gather'"))},
      {.id = "H2",
       .source = "verl-project/verl#4664",
       .kind = "M-STRIDE",
       .text = "a recomputed tensor has other strides than the saved one",
       .inexpressible = "recomputation here saves inputs only and compares no metadata: there is "
                        "nothing that other strides could break"},
      {.id = "H4",
       .source = "pytorch/pytorch#158719",
       .kind = "M-COLLSKIP",
       .text = "a rank whose loss does not reach a block leaves its exchange out",
       .cause = "collective-order",
       .first_wrong = calls,
       .plants = plants(two, training(FaultKind::kOmit, "transformer_blocks.0/grads.reduce*"))},
      {.id = "H5",
       .source = "pytorch/pytorch#76949",
       .kind = "M-COLLORDER",
       .text = "calls differ in a later step than the first, which alone is checked",
       .cause = "collective-order",
       .first_wrong = calls,
       .plants = plants(two_steps, training(FaultKind::kOmit, "*loss.report*", 1))},
      {.id = "H6",
       .source = "pytorch/pytorch#140563",
       .kind = "M-COLLORDER",
       .text = "ranks make calls of different sizes",
       .cause = "collective-order",
       .first_wrong = calls,
       .plants = plants(model, on_rank_1(one_token_fewer))},
      {.id = "H8",
       .source = "PrimeIntellect-ai/prime-rl#3186",
       .kind = "M-COLLORDER",
       .text = "the backward of one rank issues calls of two groups in another order",
       .cause = "collective-order",
       .first_wrong = calls,
       .plants =
           plants(two_blocks.with("noprefetch"), training(FaultKind::kHoldBack, "*grads.reduce*"))},
      {.id = "H9",
       .source = "xljh0520/JOTR#4",
       .kind = "M-UNEVEN",
       .text = "one rank's batch is smaller",
       .cause = "collective-order",
       .first_wrong = calls,
       .plants = plants(model, on_rank_1(one_sample_fewer))},
      {.id = "X1",
       .source = "lightseekorg/tokenspeed#1017",
       .kind = "M-REUSE",
       .text = "a buffer is used again before the peer has read it",
       .cause = "race",
       .first_wrong = {"race"},
       .plants =
           plants(ring, with_faults<AttentionSubject>({fault(FaultKind::kReuse, "kv.rotate")}))},
      {.id = "X2",
       .source = "pytorch/pytorch#197827",
       .kind = "M-NOWAIT",
       .text = "what a transfer brings is read before it has arrived",
       .cause = "missing-wait",
       .first_wrong = {"output"},
       .plants =
           plants(ring, with_faults<AttentionSubject>({fault(FaultKind::kSkipWait, "kv.rotate")}))},
  };
}

}  // namespace shardproof::verify
