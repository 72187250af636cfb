#include "base/checksum.h"

#include <bit>
#include <cstddef>
#include <cstring>

namespace shardproof {

static_assert(std::endian::native == std::endian::little, "words are read as they lie in memory");

// Position-dependent, so that exchanged values show; four lanes for speed. Every step is a
// bijection of the state and of the word, so one changed word always shows. The product moves
// changes up only: the rotation and the shift bring those of the highest bits down again, without
// which a second change could cancel them in the next word. The count tells ends of zeros apart.
uint64_t checksum(std::string_view bytes) {
  constexpr uint64_t kPrime = 0x9E3779B97F4A7C15ull;
  const auto mix = [](uint64_t hash, uint64_t word) {
    hash = std::rotl(hash ^ word, 29) * kPrime;
    return hash ^ (hash >> 32);
  };
  uint64_t lane[4] = {1, 2, 3, 4};
  size_t i = 0;
  for (; i + 32 <= bytes.size(); i += 32) {
    uint64_t words[4];
    std::memcpy(words, bytes.data() + i, 32);
    for (int l = 0; l < 4; ++l) lane[l] = mix(lane[l], words[l]);
  }
  for (; i < bytes.size(); ++i) lane[0] = mix(lane[0], static_cast<unsigned char>(bytes[i]));
  uint64_t all = bytes.size();
  for (const uint64_t one : lane) all = mix(all, one);
  return all;
}

}  // namespace shardproof
