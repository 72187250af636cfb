// A few combinations of many options that still hold every pair of their values. No LibTorch.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

namespace shardproof::verify {

// One value of each factor, by number.
using Combination = std::vector<int>;

// `levels[i]`: how many values factor i has. `strength` 1: every value is in a combination; 2:
// every pair of values of two factors is, if a combination that `allowed` lets pass has it. Greedy
// from a fixed seed: the same list on every machine.
std::vector<Combination> covering_array(const std::vector<int>& levels, int strength,
                                        const std::function<bool(const Combination&)>& allowed);

}  // namespace shardproof::verify
