// Numbers that random cases are made of.
#pragma once
#include <array>
#include <cstdint>
#include <random>

#include "comm/random_streams.h"

namespace shardproof::verify {

class Draw {
 public:
  explicit Draw(uint64_t seed) : random_(seed) {}
  int64_t between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random_() % static_cast<uint64_t>(high - low + 1));
  }
  bool chance(int64_t one_in) { return between(0, one_in - 1) == 0; }
  template <class T, size_t N>
  T one_of(const std::array<T, N>& values, int64_t last = N - 1) {
    return values[static_cast<size_t>(between(0, last))];
  }

 private:
  std::mt19937_64 random_;
};

// Small enough to be read in an id; neighbouring numbers give unrelated seeds.
inline uint64_t case_seed(uint64_t seed, uint64_t number) {
  return comm::derive_seed(seed * 1000003 + number, 0) % 1000000;
}

}  // namespace shardproof::verify
