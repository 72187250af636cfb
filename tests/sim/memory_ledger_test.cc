#include "sim/memory_ledger.h"

#include "comm/tag.h"
#include "tests/file_support.h"
#include "tests/sim/engine/watchdog.h"
#include "tests/sim/tensor_support.h"

namespace shardproof::sim {
namespace {

using at::Tensor;
using comm::CollectiveScope;
using comm::Communicator;
using tests::Watchdog;
using tests::whole_world;

Tensor bytes(int64_t n) { return at::empty({n}, at::kByte); }

World tracking_world(int ranks, int cores = 2) {
  WorldOptions options;
  options.track_memory = true;
  options.cores = cores;
  return World(ranks, options);
}

}  // namespace

TEST_CASE("peak and current bytes of each rank", "[memory]") {
  Watchdog watchdog;
  World world = tracking_world(3);
  std::vector<Tensor> kept(3);
  world.run([&](RankContext& rank) {
    const int64_t unit = 1000 * (rank.rank() + 1);
    {
      const Tensor a = bytes(2 * unit);
      const Tensor b = bytes(3 * unit);
    }
    const Tensor c = bytes(4 * unit);
    kept[static_cast<size_t>(rank.rank())] = bytes(unit / 2);
  });
  for (int r = 0; r < 3; ++r) {
    const int64_t unit = 1000 * (r + 1);
    CHECK(world.memory(r).peak == 5 * unit);
    CHECK(world.memory(r).current == unit / 2);
  }
}

TEST_CASE("a block belongs to the rank that allocated it, whoever frees it", "[memory]") {
  Watchdog watchdog;
  World world = tracking_world(2);
  Tensor block;
  world.run([&](RankContext& rank) {
    const Communicator group = whole_world(rank);
    if (rank.rank() == 0) block = bytes(5000);
    group.barrier();
    if (rank.rank() == 1) block = Tensor();
    group.barrier();
  });
  CHECK(world.memory(0).peak == 5000);
  CHECK(world.memory(0).current == 0);
  CHECK(world.memory(1).peak == 0);
  CHECK(world.memory(1).current == 0);
}

TEST_CASE("allocations are added up by tag", "[memory]") {
  Watchdog watchdog;
  World world = tracking_world(1);
  world.run([](RankContext&) {
    const Tensor untagged = bytes(10);
    const CollectiveScope block("block.0");
    for (int i = 0; i < 3; ++i) bytes(100);
    const CollectiveScope site("attn");
    bytes(7);
    const comm::MarkedScope adjoint("block.0", comm::kAdjointMark);
    bytes(1);
  });
  const std::map<std::string, int64_t> expected = {
      {"", 10}, {"block.0", 300}, {"block.0/attn", 7}, {"block.0'", 1}};
  CHECK(world.memory(0).allocated_by_tag == expected);
}

TEST_CASE("a run begins with an empty ledger", "[memory]") {
  Watchdog watchdog;
  World world = tracking_world(1);
  Tensor kept;
  world.run([&](RankContext&) { kept = bytes(3000); });
  CHECK(world.memory(0).current == 3000);
  world.run([&](RankContext&) {
    kept = Tensor();  // not of this run: neither more nor less than nothing
    const Tensor other = bytes(100);
  });
  CHECK(world.memory(0).current == 0);
  CHECK(world.memory(0).peak == 100);
}

TEST_CASE("what collectives allocate is counted to the rank that needs it", "[memory]") {
  Watchdog watchdog;
  World world = tracking_world(4);
  world.run([](RankContext& rank) {
    const Communicator group = whole_world(rank);
    const Tensor input = at::zeros({1, 256});  // 1 KiB
    const CollectiveScope scope("gather");
    const Tensor all = group.all_gather(input, {1, 1, 1, 1}).wait();
  });
  for (int r = 0; r < 4; ++r) {
    // The output; an input that others have still to read is copied when its owner goes on.
    const int64_t gather = world.memory(r).allocated_by_tag.at("gather");
    CHECK(gather >= 4096);
    CHECK(gather <= 4096 + 1024);
    CHECK(world.memory(r).current == 0);
  }
}

TEST_CASE("an input that is moved into a call is not copied and is freed with it", "[memory]") {
  Watchdog watchdog;
  World world = tracking_world(2, 1);
  world.run([](RankContext& rank) {
    const Communicator group = whole_world(rank);
    Tensor input = bytes(4000);
    const Tensor got = group.all_to_all(std::move(input), {2000, 2000}, {2000, 2000}).wait();
    group.barrier();
    const Tensor after = bytes(4000);  // in the input's place
  });
  for (const int r : {0, 1}) CHECK(world.memory(r).peak == 8000);
}

TEST_CASE("memory is there only where it was asked for", "[memory]") {
  Watchdog watchdog;
  World world(1);
  world.run([](RankContext&) { bytes(10); });
  CHECK(tests::contains(tests::error_text([&] { world.memory(0); }, ErrorKind::kInternal),
                        "track_memory"));
}

}  // namespace shardproof::sim
