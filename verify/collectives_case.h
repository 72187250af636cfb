// All collectives of a group once, on numbers whose sums are exact in every order and dtype, and
// the random streams of its ranks.
#pragma once
#include <string_view>
#include <vector>

#include "verify/case.h"

namespace shardproof::verify {

// transports/collectives/ulysses/dp1.ring1.ulysses4/bf16/integers#1, or `random`: numbers whose
// sums round, for comparing transports with each other.
struct CollectivesCase {
  int ranks = 2;
  c10::ScalarType dtype = c10::ScalarType::Float;
  bool integers = true;
  uint64_t seed = 1;

  std::string id() const;
  // Errors (kBadInput): what cannot be read.
  static CollectivesCase parse(std::string_view id);
};

// Integers: results must be the exact ones; random: only what the world finds counts.
CasePtr collectives_check(const CollectivesCase& c);

std::vector<CollectivesCase> collectives_suite(int ranks, uint64_t seed);

}  // namespace shardproof::verify
