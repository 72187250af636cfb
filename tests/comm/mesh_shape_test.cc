#include "comm/mesh_shape.h"

#include <functional>

#include "tests/file_support.h"

namespace shardproof::comm {
namespace {

using tests::contains;
using tests::error_text;

std::vector<MeshShape> shapes_up_to(int ranks) {
  std::vector<MeshShape> shapes;
  for (int dp = 1; dp <= ranks; ++dp) {
    for (int ring = 1; dp * ring <= ranks; ++ring) {
      for (int ulysses = 1; dp * ring * ulysses <= ranks; ++ulysses) {
        shapes.push_back({dp, ring, ulysses});
      }
    }
  }
  return shapes;
}

// Coordinates by counting, with ulysses as the fastest digit: no arithmetic in common with the code
// under test.
std::vector<MeshCoordinates> count_through(const MeshShape& shape) {
  std::vector<MeshCoordinates> all;
  for (int dp = 0; dp < shape.dp; ++dp) {
    for (int ring = 0; ring < shape.ring; ++ring) {
      for (int ulysses = 0; ulysses < shape.ulysses; ++ulysses) all.push_back({dp, ring, ulysses});
    }
  }
  return all;
}

std::vector<int> ranks_where(const std::vector<MeshCoordinates>& all,
                             const std::function<bool(const MeshCoordinates&)>& belongs) {
  std::vector<int> ranks;
  for (size_t r = 0; r < all.size(); ++r) {
    if (belongs(all[r])) ranks.push_back(static_cast<int>(r));
  }
  return ranks;
}

}  // namespace

TEST_CASE("a mesh is printed and read back", "[mesh_shape]") {
  CHECK(MeshShape{}.to_string() == "dp1.ring1.ulysses1");
  for (const MeshShape& shape : shapes_up_to(16)) {
    REQUIRE(MeshShape::parse(shape.to_string()) == shape);
  }
  const MeshShape large{1000, 20, 300};
  CHECK(MeshShape::parse(large.to_string()) == large);
}

TEST_CASE("dimensions may be left out and come in any order", "[mesh_shape]") {
  CHECK(MeshShape::parse("ulysses4") == MeshShape{1, 1, 4});
  CHECK(MeshShape::parse("ring2.dp3") == MeshShape{3, 2, 1});
  CHECK(MeshShape::parse("dp2.ulysses08") == MeshShape{2, 1, 8});
}

TEST_CASE("what is no mesh is refused with the text and the part that is wrong", "[mesh_shape]") {
  const auto text_of = [](const char* text) { return error_text([&] { MeshShape::parse(text); }); };
  for (const char* text :
       {"dp", "2", "dp2ring2", "dp2x", "dp 2", " dp2", "tp2", "dp2,ring2", "dp2..ring2", ".dp2",
        "dp-2", "dp+2", "dp2.0", "DP2", "dp2.ring", "dp2.5", "dp2.", ".", ""}) {
    INFO(text);
    const std::string error = text_of(text);
    INFO(error);
    CHECK(contains(error, "mesh '" + std::string(text) + "'"));
    CHECK(contains(error, "dp2.ring1.ulysses4"));  // an example to go by
  }
  CHECK(contains(text_of("dp2.tp4"), "cannot read 'tp4'"));
}

TEST_CASE("a dimension of no ranks is refused", "[mesh_shape]") {
  for (const char* text : {"dp0", "ring0.ulysses4", "dp2.ulysses0"}) {
    INFO(text);
    CHECK(contains(error_text([&] { MeshShape::parse(text); }), "at least 1"));
  }
  CHECK(contains(error_text([] { MeshShape{1, -2, 1}.check(); }), "dp1.ring-2.ulysses1"));
}

TEST_CASE("a number that does not fit is refused, not taken for another one", "[mesh_shape]") {
  for (const char* text : {"dp4294967297", "ring99999999999999999999"}) {
    INFO(text);
    CHECK(contains(error_text([&] { MeshShape::parse(text); }), "cannot read"));
  }
  // Each fits, the number of ranks does not.
  CHECK(contains(error_text([] { MeshShape::parse("dp65536.ring65536.ulysses65536"); }), "ranks"));
}

TEST_CASE("a dimension that is given twice is refused", "[mesh_shape]") {
  CHECK(contains(error_text([] { MeshShape::parse("dp2.ring2.dp4"); }), "dp4"));
  CHECK(contains(error_text([] { MeshShape::parse("ulysses2.ulysses2"); }), "ulysses2"));
}

TEST_CASE("coordinates and groups of all meshes up to 16 ranks", "[mesh_shape]") {
  for (const MeshShape& shape : shapes_up_to(16)) {
    INFO(shape.to_string());
    const std::vector<MeshCoordinates> all = count_through(shape);
    REQUIRE(static_cast<int>(all.size()) == shape.world());
    REQUIRE(shape.sp() == shape.ring * shape.ulysses);
    for (int rank = 0; rank < shape.world(); ++rank) {
      const MeshCoordinates want = all[static_cast<size_t>(rank)];
      const MeshCoordinates got = coordinates(shape, rank);
      REQUIRE(got.dp == want.dp);
      REQUIRE(got.ring == want.ring);
      REQUIRE(got.ulysses == want.ulysses);
      REQUIRE(group_ranks(shape, rank, "dp") == ranks_where(all, [&](const auto& at) {
                return at.ring == want.ring && at.ulysses == want.ulysses;
              }));
      REQUIRE(group_ranks(shape, rank, "ring") == ranks_where(all, [&](const auto& at) {
                return at.dp == want.dp && at.ulysses == want.ulysses;
              }));
      REQUIRE(group_ranks(shape, rank, "ulysses") == ranks_where(all, [&](const auto& at) {
                return at.dp == want.dp && at.ring == want.ring;
              }));
      REQUIRE(group_ranks(shape, rank, "sp") ==
              ranks_where(all, [&](const auto& at) { return at.dp == want.dp; }));
    }
  }
}

TEST_CASE("asking for what a mesh does not have is an internal error", "[mesh_shape]") {
  const MeshShape shape{2, 1, 2};
  for (const int rank : {-1, 4}) {
    const std::string text = error_text([&] { coordinates(shape, rank); }, ErrorKind::kInternal);
    CHECK(contains(text, "dp2.ring1.ulysses2"));
  }
  CHECK(contains(error_text([&] { group_ranks(shape, 0, "tp"); }, ErrorKind::kInternal), "tp"));
}

}  // namespace shardproof::comm
