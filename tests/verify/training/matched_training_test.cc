// Training equals the run without ranks in the same arithmetic to the bit, and what is a rounding
// away from it does not.
#include "tests/catch.h"
#include "verify/mutants/altered_context.h"
#include "verify/training/training_check.h"

namespace shardproof::verify {
namespace {

constexpr const char* kCase =
    "training/qwenimage/hybrid/dp1.ring2.ulysses2.fsdp4/bf16/"
    "b1.t5.g1x3x5.l2.h4.d16.ragged.s2.clip#5";

CaseResult check(const std::string& id, const TrainingSubject& subject, sim::WorldOptions options) {
  WorldPool worlds(std::move(options));
  return check_training(TrainingCase::parse(id), subject, worlds, TrainingReference::kMatched);
}

TEST_CASE("matched: parallel training has the bits of the reference", "[matched]") {
  for (const char* id :
       {kCase,
        "training/flux/ulysses/dp2.ring1.ulysses2.fsdp2/fp32/b1.t8.g1x4x6.l1.h4.d16.cfg.s2.acc3#5",
        "training/sd3/allgather/dp1.ring2.ulysses1.fsdp2/bf16/b1.t5.g1x3x5.l1.h4.d16.tokenpad.s1."
        "acc3.defer#5",
        "training/wan/ring/dp1.ring3.ulysses1.fsdp3/fp16/"
        "b1.t6.g2x3x4.l1.h3.d12.recompute.drop.s1.sgd#5",
        "training/wan/local/dp2.ring1.ulysses1.fsdp1/fp64/"
        "b1.t5.g2x3x5.l2.h4.d12.cfg.s1.masked.repl."
        "sgd#137690",
        "training/qwenimage_edit/ulysses/dp2.ring1.ulysses2.fsdp4/fp32/b1.t8.g1x4x6.l1.h4.d16.lora."
        "textrep.A.s1.masked#5"}) {
    const CaseResult result = check(id, {}, {});
    INFO(id << ": " << result.first_wrong << result.reason);
    CHECK(result.status == Status::kPass);
  }
}

TEST_CASE("matched: sums in another order have other bits", "[matched]") {
  sim::WorldOptions options;
  options.reduce_order = sim::ReduceOrder::kNcclRing;
  CHECK(check(kCase, {}, options).status == Status::kFail);
}

TEST_CASE("matched: mistakes break it", "[matched]") {
  // Two rows of a rank's position table change places: attention still runs, on other positions.
  const auto positions = in_context<TrainingSubject>([](AlteredContext& context, int rank) {
    if (rank != 1) return;
    context.edit_rows = [](const at::Tensor& rows, const at::Tensor& whole, const plan::StreamPlan&,
                           int64_t) { return whole.dim() == 2 ? rows.roll(1, 0) : rows; };
  });
  const CaseResult swapped = check(kCase, positions, {});
  CHECK(swapped.status == Status::kFail);
  CHECK(swapped.first_wrong == "step0/loss");
  // The last digit of one number of one gradient.
  TrainingSubject rounded;
  rounded.edit_gradients = [](const std::vector<fsdp::TrainedTensor>& tensors, int rank) {
    if (rank == 2) tensors[0].grad.view(-1).narrow(0, 0, 1).mul_(1 + 1.3e-7);
  };
  const CaseResult one = check(kCase, rounded, {});
  CHECK(one.status == Status::kFail);
  CHECK(one.first_wrong.ends_with(":grad"));
}

}  // namespace
}  // namespace shardproof::verify
