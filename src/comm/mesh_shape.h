// The named dimensions that ranks are arranged in. No LibTorch.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace shardproof::comm {

// World rank = (dp_index * ring + ring_index) * ulysses + ulysses_index: sequence-parallel ranks
// are consecutive and `ulysses` is innermost. sp = ring x ulysses.
struct MeshShape {
  int dp = 1;
  int ring = 1;
  int ulysses = 1;

  int sp() const { return ring * ulysses; }
  int world() const { return dp * sp(); }
  std::string to_string() const;  // "dp1.ring2.ulysses4"
  // Accepts what to_string() prints; missing dimensions are 1. Errors (kBadInput): anything else,
  // an empty text and a dimension that is given twice among it.
  static MeshShape parse(std::string_view text);
  // Errors (kBadInput): a dimension below 1, more ranks than anybody has.
  void check() const;

  bool operator==(const MeshShape&) const = default;
};

struct MeshCoordinates {
  int dp = 0;
  int ring = 0;
  int ulysses = 0;
};
MeshCoordinates coordinates(const MeshShape& shape, int world_rank);

// World ranks that share all coordinates but the named one ("dp", "ring", "ulysses", "sp"), in
// order of that coordinate.
std::vector<int> group_ranks(const MeshShape& shape, int world_rank, std::string_view dimension);

}  // namespace shardproof::comm
