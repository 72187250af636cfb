// O: faults that nobody has reported and that published tests are known to accept, and those that
// the checks must be shown to see.
#include <ATen/ATen.h>

#include "verify/mutants/altered_context.h"
#include "verify/mutants/planting.h"

namespace shardproof::verify {
namespace {

// One head of the first block's attention output, of the second rank.
ModelSubject zeroed_head() {
  return in_context<ModelSubject>([](AlteredContext& context, int rank) {
    if (rank != 1) return;
    context.wrap_attention = [](const models::JointAttention& right) {
      return [right](const std::vector<attention::StreamQkv>& streams, const at::Tensor& mask) {
        attention::SequenceParallelOutput out = right(streams, mask);
        at::Tensor keep = at::ones({out.streams[0].size(2), 1}, out.streams[0].options());
        keep[2] = 0;
        for (at::Tensor& stream : out.streams) stream = stream * keep;
        return out;
      };
    };
  });
}

Mutant own(const char* id, const char* kind, const char* text, const char* cause,
           std::vector<std::string> first_wrong, bool forward_right, std::vector<Plant> plants) {
  Mutant mutant;
  mutant.id = id, mutant.source = "ours", mutant.kind = kind, mutant.text = text;
  mutant.cause = cause, mutant.first_wrong = std::move(first_wrong);
  mutant.forward_right = forward_right, mutant.plants = std::move(plants);
  return mutant;
}

}  // namespace

std::vector<Mutant> own_mutants() {
  const AttentionSpot ring{"dp1.ring4.ulysses1"}, u4{"dp1.ring1.ulysses4"},
      masked{"dp1.ring1.ulysses2", "b2.t8.i24.h4.d16.scattered"};
  return {
      own("O1", "M-MERGE", "ring blocks are averaged without their log-sum-exp", "layout",
          {"output"}, false, plants(ring, "lse-ignored")),
      own("O2", "M-SCALE", "all gradients times 0.9 (fp64: 0.999)", "scale", {"q:grad"}, true,
          plants(ring, "gradients-scaled")),
      own("O3", "M-ADJOINT", "dq of one rank is zero", "backward", {"q:grad"}, true,
          plants(ring, "dq-zero")),
      own("O4", "M-HEADSPLIT", "one head of one layer is zero on one rank", "layout", {"block.0.*"},
          false, plants(ModelSpot{"dp1.ring1.ulysses2"}, zeroed_head())),
      own("O5", "M-GROUP", "output heads are taken from the neighbour's group", "layout",
          {"output"}, false, plants(u4, "heads-rotated")),
      own("O6", "M-MASK", "the mask is read in stream order, tokens are rank-major", "ownership",
          {"output"}, false, plants(masked, "mask-stream-order")),
  };
}

}  // namespace shardproof::verify
