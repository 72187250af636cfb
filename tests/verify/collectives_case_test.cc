// The check of all collectives passes on the simulator and sees one wrong row.
#include "verify/collectives_case.h"

#include "tests/catch.h"

#include "tests/file_support.h"
#include "verify/dtype.h"

namespace shardproof::verify {
namespace {

using tests::contains;
using tests::error_text;

TEST_CASE("collectives: exact on virtual ranks, in every dtype", "[transport]") {
  WorldPool worlds(sim::WorldOptions{});
  for (const int ranks : {1, 2, 3, 5}) {
    for (const CollectivesCase& c : collectives_suite(ranks, 7)) {
      if (!c.integers) continue;
      const CaseResult result = collectives_check(c)->check(worlds);
      INFO(result.id << " " << result.reason);
      CHECK(result.status == Status::kPass);
      CHECK(CollectivesCase::parse(c.id()).id() == c.id());
    }
  }
}

// The simulator with a fault that verify does not know of.
class FaultyWorld final : public RankWorld {
 public:
  explicit FaultyWorld(sim::World& world) : inner_(world), world_(world) {}
  int size() const override { return inner_.size(); }
  bool judges() const override { return true; }
  void plant(const sim::FaultPlan&) override {
    sim::Fault fault;
    fault.kind = sim::FaultKind::kDrop;
    fault.rank = 1;
    fault.occurrence = 2;
    world_.set_faults({fault});
  }
  void run(const RankProgram& program, std::vector<RankResult>& results) override {
    inner_.run(program, results);
  }
  const std::vector<CollectiveCall>& calls(int rank) const override { return inner_.calls(rank); }

 private:
  SimRankWorld inner_;
  sim::World& world_;
};

class FaultyWorlds final : public Worlds {
 public:
  RankWorld& get(int) override { return ranks_; }
  at::Device device() const override { return at::kCPU; }

 private:
  sim::World world_{3};
  FaultyWorld ranks_{world_};
};

TEST_CASE("collectives: a result that does not arrive", "[transport]") {
  FaultyWorlds worlds;
  const CaseResult result = collectives_check({3, c10::ScalarType::Float, true, 7})->check(worlds);
  CHECK(result.status == Status::kFail);
  REQUIRE(result.checks.size() == 2);
  CHECK(result.checks[1].status == Status::kPass);  // random numbers do not travel
  CHECK(contains(result.checks[0].detail, "rank 1: "));
  CHECK(contains(result.checks[0].detail, "is not exact"));
}

TEST_CASE("collectives: ids that cannot be read", "[transport]") {
  for (const char* id : {"transports/collectives/ring/ring2/fp32/integers",
                         "transports/all/ulysses/ulysses2/fp32/integers",
                         "transports/collectives/ulysses/ulysses2/fp32/reals"}) {
    CHECK(contains(error_text([&] { CollectivesCase::parse(id); }),
                   "expected transports/collectives"));
  }
}

}  // namespace
}  // namespace shardproof::verify
