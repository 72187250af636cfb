// Training equals the run without ranks in the same arithmetic to the bit, and what is a rounding
// away from it does not.
#include "tests/catch.h"
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
        "training/wan/ring/dp1.ring3.ulysses1.fsdp3/fp16/b1.t6.g2x3x4.l1.h3.d12.recompute.s1.sgd#5",
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

// Two rows of a rank's position table change places: attention still runs, on other positions.
class SwappedPositions final : public models::ParallelContext {
 public:
  SwappedPositions(const comm::Mesh& mesh, models::ParallelOptions options)
      : ParallelContext(options), right_(mesh, options) {}
  at::Device device() const override { return right_.device(); }
  plan::AttentionPlan plan(const std::vector<std::pair<std::string, int64_t>>& streams,
                           int64_t heads) const override {
    return right_.plan(streams, heads);
  }
  at::Tensor own_rows(const at::Tensor& x, const plan::StreamPlan& stream,
                      int64_t dim) const override {
    const at::Tensor rows = right_.own_rows(x, stream, dim);
    return dim == 0 && x.dim() == 2 ? rows.roll(1, 0) : rows;
  }
  models::JointAttention attention(plan::AttentionPlan plan, at::ScalarType dtype,
                                   bool masked) const override {
    return right_.attention(std::move(plan), dtype, masked);
  }
  at::Tensor gather(const at::Tensor& x, const plan::StreamPlan& stream,
                    const std::string& site) const override {
    return right_.gather(x, stream, site);
  }

 private:
  models::MeshContext right_;
};

TEST_CASE("matched: mistakes break it", "[matched]") {
  TrainingSubject positions, rounded;
  positions.make_context = [](const comm::Mesh& mesh, models::ParallelOptions options,
                              int rank) -> std::unique_ptr<models::ParallelContext> {
    if (rank == 1) return std::make_unique<SwappedPositions>(mesh, std::move(options));
    return std::make_unique<models::MeshContext>(mesh, std::move(options));
  };
  const CaseResult swapped = check(kCase, positions, {});
  CHECK(swapped.status == Status::kFail);
  CHECK(swapped.first_wrong == "step0/loss");
  // The last digit of one number of one gradient.
  rounded.edit_gradients = [](const std::vector<fsdp::TrainedTensor>& tensors, int rank) {
    if (rank == 2) tensors[0].grad.view(-1).narrow(0, 0, 1).mul_(1 + 1.3e-7);
  };
  const CaseResult one = check(kCase, rounded, {});
  CHECK(one.status == Status::kFail);
  CHECK(one.first_wrong.ends_with(":grad"));
}

}  // namespace
}  // namespace shardproof::verify
