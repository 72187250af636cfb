// Mistakes that training code makes where sequence parallelism meets FSDP: each must be caught, and
// the first wrong quantity must be the one that it spoils.
#include "tests/catch.h"

#include "verify/training/training_check.h"

namespace shardproof::verify {
namespace {

struct Planted {
  const char* what;
  const char* id;
  const char* first_wrong;  // part of the name
  TrainingSubject subject;
};

sim::Fault fault(sim::FaultKind kind, const char* tag, double factor = 1) {
  sim::Fault f;
  f.kind = kind;
  f.tag = tag;
  f.factor = factor;
  return f;
}

constexpr const char* kPlain =
    "training/qwenimage/ulysses/dp2.ring1.ulysses2.fsdp4/fp64/b1.t8.g1x4x6.l2.h4.d16.s1#3";
constexpr const char* kHybrid =
    "training/flux/ulysses/dp2.ring1.ulysses2.fsdp2/fp64/b1.t6.g1x3x4.l1.h4.d16.s1.repl#3";
constexpr const char* kMasked =
    "training/sd3/ulysses/dp2.ring1.ulysses2.fsdp4/fp64/b1.t6.g1x3x4.l1.h4.d16.s1.masked.acc2#3";
constexpr const char* kScaled =
    "training/wan/ulysses/dp1.ring1.ulysses2.fsdp2/fp64/b1.t6.g2x3x4.l1.h4.d12.A.s1#3";
constexpr const char* kClipped =
    "training/wan/ulysses/dp1.ring1.ulysses2.fsdp2/fp64/b1.t6.g2x3x4.l1.h4.d12.s1.clip#3";
constexpr const char* kDeferred =
    "training/sd3/ulysses/dp1.ring1.ulysses2.fsdp2/fp64/b1.t6.g1x3x4.l1.h4.d16.s1.acc2.defer#3";
constexpr const char* kLow =
    "training/qwenimage/ulysses/dp2.ring1.ulysses2.fsdp4/fp32/b1.t8.g1x4x6.l2.h4.d16.s1#3";

constexpr const char* kDropped =
    "training/flux/ulysses/dp2.ring1.ulysses2.fsdp4/fp64/b1.t6.g1x3x4.l1.h4.d16.drop.s1#3";

std::vector<Planted> planted_faults() {
  using sim::FaultKind;
  std::vector<Planted> all = {
      {"gradients are summed, not averaged", kPlain, ":grad", {}},
      {"gradients are divided by sp once more", kPlain, ":grad", {}},
      {"one block's gradients are not exchanged", kPlain, "transformer_blocks.1", {}},
      {"replicated gradients differ between ranks", kHybrid, "", {}},
      {"copies of a shard have other gradients", kHybrid, "", {}},
      {"gradients are summed in bf16", kLow, ":grad", {}},
      {"each replica divides by its own mask", kMasked, "loss", {}},
      {"the loss is not multiplied by sp", kScaled, ":grad", {}},
      {"shards of the weights arrive in another order", kPlain, "", {}},
      {"clipping is left out", kClipped, ":exp_avg", {}},
      {"the learning rate differs between ranks", kPlain, ":update", {}},
      {"gradients are clipped shard by shard", kPlain, ":grad", {}},
      {"gradients that should wait are exchanged in every micro-batch", kDeferred, "", {}},
      {"dropout masks differ inside sp", kDropped, "loss", {}},
      {"dropout masks are the same on all replicas", kDropped, "loss", {}},
  };
  all[0].subject.faults = {fault(FaultKind::kScale, "*grads.reduce*", 4)};
  all[1].subject.faults = {fault(FaultKind::kScale, "*grads.reduce*", 0.5)};
  all[2].subject.faults = {fault(FaultKind::kDrop, "transformer_blocks.1/grads.reduce*")};
  all[3].subject.edit_gradients = [](const std::vector<fsdp::TrainedTensor>& tensors, int rank) {
    for (const auto& t : tensors) {
      if (t.replicated) t.grad.mul_(1 + 0.01 * rank);
    }
  };
  all[4].subject.edit_gradients = [](const std::vector<fsdp::TrainedTensor>& tensors, int rank) {
    for (const auto& t : tensors) {
      if (!t.replicated && rank >= 2) t.grad.mul_(0.5);
    }
  };
  all[5].subject.faults = {fault(FaultKind::kRound, "*grads.reduce*")};
  all[6].subject.edit_count = [](double, double own) { return own * 2; };
  all[7].subject.edit_step = [](fsdp::StepOptions& o, int) {
    o.convention = plan::GradientConvention::kSliceTimesSp;
  };
  all[8].subject.faults = {fault(FaultKind::kRotatePeers, "*weights.gather*")};
  all[9].subject.edit_step = [](fsdp::StepOptions& o, int) { o.max_norm = 1e30; };
  all[10].subject.edit_step = [](fsdp::StepOptions& o, int rank) {
    if (rank == 3) o.learning_rate *= 1.01;
  };
  all[11].subject.edit_gradients = [](const std::vector<fsdp::TrainedTensor>& tensors, int) {
    for (const auto& t : tensors) fsdp::clip_gradients({t}, t.grad.norm().item<double>() + 1, 0.1);
  };
  all[12].subject.edit_step = [](fsdp::StepOptions& o, int) { o.deferred_sync = false; };
  all[13].subject.edit_dropout = [](models::Dropout& d, int rank) {
    d.seed += static_cast<uint64_t>(rank % 2);
  };
  all[14].subject.edit_dropout = [](models::Dropout& d, int) { d.first_sample = 0; };
  return all;
}

TEST_CASE("training: planted mistakes are caught", "[training]") {
  WorldPool worlds(sim::WorldOptions{});
  for (const Planted& planted : planted_faults()) {
    const TrainingCase c = TrainingCase::parse(planted.id);
    const CaseResult result = check_training(c, planted.subject, worlds);
    INFO(planted.what << ": first wrong " << result.first_wrong << ", " << result.reason);
    CHECK(result.status == Status::kFail);
    CHECK(result.first_wrong.find(planted.first_wrong) != std::string::npos);
    CHECK(check_training(c, {}, worlds).status == Status::kPass);
  }
}

}  // namespace
}  // namespace shardproof::verify
