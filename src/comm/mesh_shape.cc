#include "comm/mesh_shape.h"

#include <charconv>
#include <set>

#include "base/error.h"

namespace shardproof::comm {

std::string MeshShape::to_string() const {
  return fmt::format("dp{}.ring{}.ulysses{}", dp, ring, ulysses);
}

MeshShape MeshShape::parse(std::string_view text) {
  MeshShape shape;
  const std::string whole(text);
  std::set<std::string_view> given;
  for (bool more = true; more;) {
    const size_t dot = text.find('.');
    const std::string_view part = text.substr(0, dot);
    more = dot != std::string_view::npos;
    if (more) text = text.substr(dot + 1);
    const size_t digits = part.find_first_of("0123456789");
    const std::string_view name = part.substr(0, digits);
    int* field = name == "dp"        ? &shape.dp
                 : name == "ring"    ? &shape.ring
                 : name == "ulysses" ? &shape.ulysses
                                     : nullptr;
    const char* end = part.data() + part.size();
    const auto read = [&] {
      const auto [stop, error] = std::from_chars(part.data() + digits, end, *field);
      return stop == end && error == std::errc();
    };
    if (!field || digits == std::string_view::npos || !read()) {
      bad_input("mesh '{}': cannot read '{}'; expected a form like dp2.ring1.ulysses4", whole,
                part);
    }
    if (!given.insert(name).second) {
      bad_input("mesh '{}': '{}' gives {} a second time", whole, part, name);
    }
  }
  shape.check();
  return shape;
}

void MeshShape::check() const {
  if (dp < 1 || ring < 1 || ulysses < 1) {
    bad_input("mesh {}: every dimension must be at least 1", to_string());
  }
  constexpr int kMostRanks = 1 << 24;  // world() is an int
  if (ring > kMostRanks / dp || ulysses > kMostRanks / (dp * ring)) {
    bad_input("mesh {}: expected at most {} ranks", to_string(), kMostRanks);
  }
}

MeshCoordinates coordinates(const MeshShape& shape, int world_rank) {
  SP_CHECK(world_rank >= 0 && world_rank < shape.world(), "rank {} in mesh {}", world_rank,
           shape.to_string());
  return {world_rank / shape.sp(), world_rank % shape.sp() / shape.ulysses,
          world_rank % shape.ulysses};
}

std::vector<int> group_ranks(const MeshShape& shape, int world_rank, std::string_view dimension) {
  const MeshCoordinates at = coordinates(shape, world_rank);
  auto rank_of = [&](int dp, int ring, int ulysses) {
    return (dp * shape.ring + ring) * shape.ulysses + ulysses;
  };
  std::vector<int> ranks;
  if (dimension == "dp") {
    for (int i = 0; i < shape.dp; ++i) ranks.push_back(rank_of(i, at.ring, at.ulysses));
  } else if (dimension == "ring") {
    for (int i = 0; i < shape.ring; ++i) ranks.push_back(rank_of(at.dp, i, at.ulysses));
  } else if (dimension == "ulysses") {
    for (int i = 0; i < shape.ulysses; ++i) ranks.push_back(rank_of(at.dp, at.ring, i));
  } else if (dimension == "sp") {
    for (int i = 0; i < shape.sp(); ++i) ranks.push_back(rank_of(at.dp, 0, i));
  } else {
    internal_error("no mesh dimension '{}'", dimension);
  }
  return ranks;
}

}  // namespace shardproof::comm
