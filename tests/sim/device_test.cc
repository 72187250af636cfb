#include "tests/device.h"

#include "comm/tag.h"

#include "tests/sim/engine/watchdog.h"
#include "tests/sim/tensor_support.h"

namespace shardproof::sim {
namespace {

using tests::device;
using tests::require_text;
using tests::require_violation;
using tests::violation_of;
using tests::Watchdog;
using tests::whole_world;

// The error of a world of `ours` one of whose ranks sends a tensor of `theirs`.
CollectiveError refusal(at::Device ours, at::Device theirs) {
  WorldOptions options;
  options.device = ours;
  World world(2, options);
  return violation_of([&] {
    world.run([&](RankContext& rank) {
      const comm::CollectiveScope scope("norm");
      const at::Tensor x = at::ones({2}, rank.rank() == 1 ? theirs : ours);
      whole_world(rank).all_reduce(x).wait();
    });
  });
}

}  // namespace

TEST_CASE("a tensor of another device than the world's is refused, once and by name", "[.cuda]") {
  Watchdog watchdog;
  REQUIRE(device().is_cuda());  // the tag's tests are run with --device cuda
  for (const auto& [ours, theirs] :
       {std::pair(device(), at::Device(at::kCPU)), std::pair(at::Device(at::kCPU), device())}) {
    const CollectiveError error = refusal(ours, theirs);
    require_violation(error, ViolationKind::kRankFailed);
    const std::string why = "the world moves tensors on " + ours.str();
    require_text(error, {why + "; got one on " + theirs.str(), "'world'", "'norm'", "rank 1"});
    const std::string text = error.what();
    CHECK(text.find(why) == text.rfind(why));
    CHECK(error.kind() == ErrorKind::kBadInput);
  }
}

}  // namespace shardproof::sim
