// What guards the deliveries of real transports, over a transport that delivers on request.
#include "sim/delivery_guard.h"

#include "tests/catch.h"

#include <ATen/ATen.h>

#include "base/error.h"
#include "comm/communicator.h"
#include "comm/tag.h"
#include "sim/world.h"
#include "tests/file_support.h"

namespace shardproof::sim {
namespace {

using at::Tensor;
using tests::contains;
using tests::error_text;

class LateWork final : public c10d::Work {
 public:
  explicit LateWork(Tensor output) : output_(std::move(output)) {}
  bool wait(std::chrono::milliseconds) override {
    output_.fill_(7);
    return true;
  }

 private:
  Tensor output_;
};

// Delivers sevens when it is waited for.
class LateBackend final : public c10d::Backend {
 public:
  LateBackend() : c10d::Backend(0, 2) {}
  const std::string getBackendName() const override { return "late"; }
  c10::intrusive_ptr<c10d::Work> _allgather_base(Tensor& output, Tensor&,
                                                 const c10d::AllgatherOptions&) override {
    return c10::make_intrusive<LateWork>(output);
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<Tensor>& tensors,
                                           const c10d::AllreduceOptions&) override {
    return c10::make_intrusive<LateWork>(tensors.at(0));
  }
};

comm::Communicator guarded(const std::vector<std::string>& faults) {
  FaultPlan plan;
  for (const std::string& text : faults) plan.push_back(parse_fault(text));
  auto backend = c10::make_intrusive<comm::RecordingBackend>(
      c10::make_intrusive<LateBackend>(), "pair", std::make_shared<comm::CallLog>(),
      std::make_shared<DeliveryGuard>(plan, 0));
  return {std::move(backend), "pair", {0, 1}};
}

Tensor gather(const comm::Communicator& group) {
  return group.all_gather(at::ones({2, 3}), {2, 2}).wait();
}

TEST_CASE("delivery guard: a result that was waited for is there", "[transport]") {
  CHECK(gather(guarded({})).eq(7).all().item<bool>());
}

TEST_CASE("delivery guard: a result that was not waited for is NaN", "[transport]") {
  const comm::Communicator group = guarded({"skip-wait,call=1"});
  CHECK(gather(group).eq(7).all().item<bool>());
  CHECK(gather(group).isnan().all().item<bool>());
  CHECK(gather(group).eq(7).all().item<bool>());
  // Faults of other ranks and tags are not ours.
  CHECK(gather(guarded({"skip-wait,rank=1"})).eq(7).all().item<bool>());
  CHECK(gather(guarded({"skip-wait,tag=kv.*"})).eq(7).all().item<bool>());
}

TEST_CASE("delivery guard: what is reduced in place keeps its values until then", "[transport]") {
  const Tensor x = at::full({3}, 2.0);
  auto pending = guarded({}).all_reduce(x);
  CHECK(x.eq(2).all().item<bool>());
  pending.wait();
}

TEST_CASE("delivery guard: a killed rank says where", "[transport]") {
  const comm::CollectiveScope scope("weights");
  CHECK(contains(error_text([] { gather(guarded({"kill"})); }, ErrorKind::kViolation),
                 "rank 0 was killed by the fault plan at tag 'weights'"));
}

TEST_CASE("delivery guard: faults that only the simulator can plant", "[transport]") {
  CHECK(contains(error_text([] { guarded({"drop"}); }), "'drop' can be planted in the simulator"));
  WorldOptions options;
  options.faults = {parse_fault("hang")};
  CHECK(contains(error_text([&] { World(2, options); }), "real ranks only"));
}

TEST_CASE("faults: read from a line", "[transport]") {
  const Fault fault = parse_fault("round,dtype=fp16,rank=3,call=2,tag=*dkv*,factor=0.5,shift=-1");
  CHECK(fault.kind == FaultKind::kRound);
  CHECK(fault.dtype == c10::ScalarType::Half);
  CHECK(fault.rank == 3);
  CHECK(fault.occurrence == 2);
  CHECK(fault.tag == "*dkv*");
  CHECK(fault.factor == 0.5);
  CHECK(fault.shift == -1);
  CHECK(parse_fault("skip-wait").rank == -1);
  CHECK(contains(error_text([] { parse_fault("skipwait"); }), "unknown fault 'skipwait'; known: "));
  CHECK(contains(error_text([] { parse_fault("drop,rank=a"); }), "expected a number"));
  CHECK(contains(error_text([] { parse_fault("drop,rank"); }), "expected a number"));
  CHECK(contains(error_text([] { parse_fault("drop,who=1"); }), "expected rank="));
  CHECK(contains(error_text([] { parse_fault("round,dtype=int8"); }), "expected fp32, bf16"));
}

}  // namespace
}  // namespace shardproof::sim
