#include "base/checksum.h"

#include <algorithm>
#include <set>
#include <string>

#include "tests/catch.h"

namespace shardproof {
namespace {

// No two of the first 256 bytes are the same.
std::string sample(size_t size) {
  std::string bytes;
  for (size_t i = 0; i < size; ++i) bytes += static_cast<char>(i * 37 + 11);
  return bytes;
}

// Computed by a second implementation, in Python.
TEST_CASE("the checksum of given bytes stays what it is: files hold it", "[checksum]") {
  CHECK(checksum("") == 0x1521f3bd58ff1ff8ull);
  CHECK(checksum("shardproof") == 0x6f6249ba6c330d06ull);
  CHECK(checksum(sample(100)) == 0x87b9dcdd1544f932ull);
}

// That no two of them give the same means that two flipped bits show as well.
TEST_CASE("each flipped bit shows, and any two", "[checksum]") {
  for (const size_t size : {1, 31, 32, 33, 64, 101, 256}) {
    const std::string bytes = sample(size);
    std::set<uint64_t> sums = {checksum(bytes)};
    for (size_t bit = 0; bit < 8 * size; ++bit) {
      std::string damaged = bytes;
      damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << bit % 8));
      sums.insert(checksum(damaged));
    }
    CHECK(sums.size() == 8 * size + 1);
  }
}

TEST_CASE("two flipped signs do not cancel", "[checksum]") {
  const std::string bytes = sample(128);
  for (size_t first = 7; first < 128; first += 8) {
    for (size_t second = first + 8; second < 128; second += 8) {
      std::string damaged = bytes;
      for (const size_t at : {first, second}) damaged[at] = static_cast<char>(damaged[at] ^ 0x80);
      REQUIRE(checksum(damaged) != checksum(bytes));
    }
  }
}

TEST_CASE("moved, lost and added bytes show", "[checksum]") {
  const std::string bytes = sample(128);
  std::set<uint64_t> sums = {checksum(bytes)};
  size_t changes = 1;
  for (size_t a = 0; a < 128; a += 8) {
    for (size_t b = a + 8; b < 128; b += 8, ++changes) {
      std::string exchanged = bytes;
      std::swap_ranges(exchanged.begin() + static_cast<long>(a),
                       exchanged.begin() + static_cast<long>(a) + 8,
                       exchanged.begin() + static_cast<long>(b));
      sums.insert(checksum(exchanged));
    }
  }
  for (size_t size = 0; size < 128; ++size, ++changes) {
    sums.insert(checksum(std::string_view(bytes).substr(0, size)));
  }
  CHECK(sums.size() == changes);
  std::set<uint64_t> zeros;
  for (size_t size = 0; size < 200; ++size) zeros.insert(checksum(std::string(size, '\0')));
  CHECK(zeros.size() == 200);
}

}  // namespace
}  // namespace shardproof
