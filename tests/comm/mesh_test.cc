#include "comm/mesh.h"

#include "tests/file_support.h"
#include "tests/sim/engine/watchdog.h"
#include "tests/sim/tensor_support.h"

namespace shardproof::comm {
namespace {

using tests::contains;
using tests::expect;
using tests::Watchdog;

// The group is what the mesh's shape says, and its members really meet in it.
void check_group(const Communicator& group, const std::string& dimension, const MeshShape& shape,
                 int rank) {
  const std::vector<int> members = group_ranks(shape, rank, dimension);
  const std::string what = fmt::format("{} of rank {} in {}", dimension, rank, shape.to_string());
  expect(group.size() == static_cast<int>(members.size()), "size of " + what);
  expect(group.world_ranks() == members, "members of " + what);
  expect(members[static_cast<size_t>(group.rank())] == rank, "own place in " + what);
  expect(group.name() == dimension, "name of " + what);
  const at::Tensor mine = at::full({1, 1}, rank, at::kLong);
  const at::Tensor all =
      group.all_gather(mine, std::vector<int64_t>(members.size(), 1)).wait().view({-1});
  expect(all.numel() == static_cast<int64_t>(members.size()), "one value a member of " + what);
  for (size_t i = 0; i < members.size(); ++i) {
    expect(all[static_cast<int64_t>(i)].item<int64_t>() == members[i], "who meets in " + what);
  }
}

}  // namespace

TEST_CASE("the groups of all meshes up to 8 ranks", "[mesh]") {
  for (int n = 1; n <= 8; ++n) {
    sim::World world(n);
    for (int dp = 1; dp <= n; ++dp) {
      for (int ring = 1; n % dp == 0 && ring <= n / dp; ++ring) {
        if (n / dp % ring != 0) continue;
        const MeshShape shape{dp, ring, n / dp / ring};
        INFO(shape.to_string());
        Watchdog watchdog;
        world.run([&](sim::RankContext& context) {
          const Mesh mesh(context, shape);
          const int rank = context.rank();
          check_group(mesh.dp(), "dp", shape, rank);
          check_group(mesh.ring(), "ring", shape, rank);
          check_group(mesh.ulysses(), "ulysses", shape, rank);
          check_group(mesh.sp(), "sp", shape, rank);
          const MeshCoordinates at = coordinates(shape, rank);
          expect(
              mesh.at().dp == at.dp && mesh.at().ring == at.ring && mesh.at().ulysses == at.ulysses,
              "coordinates");
          expect(mesh.sp_rank() == mesh.sp().rank(), "SP rank");
          expect(mesh.sp_rank() == rank % shape.sp(), "SP ranks are consecutive");
          expect(mesh.shape() == shape, "shape");
          expect(mesh.device() == at::Device(at::kCPU), "device");
        });
      }
    }
  }
}

TEST_CASE("a mesh that is not of the world's size is refused", "[mesh]") {
  Watchdog watchdog;
  sim::World world(4);
  const auto text_of = [&](const MeshShape& shape) {
    return tests::error_text(
        [&] { world.run([&](sim::RankContext& rank) { Mesh mesh(rank, shape); }); });
  };
  CHECK(contains(text_of({2, 1, 1}), "mesh dp2.ring1.ulysses1 needs 2 ranks; the world has 4"));
  CHECK(contains(text_of({1, 2, 4}), "mesh dp1.ring2.ulysses4 needs 8 ranks; the world has 4"));
  CHECK(contains(text_of({-1, -2, 2}), "at least 1"));
}

TEST_CASE("two meshes of one world do not mix", "[mesh]") {
  Watchdog watchdog;
  sim::World world(4);
  world.run([](sim::RankContext& rank) {
    const Mesh first(rank, {1, 1, 4}), second(rank, {1, 1, 4});
    const std::vector<int64_t> rows(4, 1);
    Pending a = first.ulysses().all_gather(at::full({1}, 1.0), rows);
    Pending b = second.ulysses().all_gather(at::full({1}, 2.0), rows);
    expect(at::equal(b.wait(), at::full({4}, 2.0)), "the second mesh's values");
    expect(at::equal(a.wait(), at::full({4}, 1.0)), "the first mesh's values");
  });
}

}  // namespace shardproof::comm
