// A checksum that shows damage to data: bits flipped, bytes moved, cut off or added. Not against
// people: whoever wants to can make bytes of a given checksum.
#pragma once
#include <cstdint>
#include <string_view>

namespace shardproof {

// Of all the bytes. The same on every machine that this program runs on (little endian), and kept
// in files: a change of it makes them unreadable.
uint64_t checksum(std::string_view bytes);

}  // namespace shardproof
