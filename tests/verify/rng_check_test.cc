// Which ranks must have drawn the same random numbers, and which must not.
#include "verify/rng_check.h"

#include "tests/catch.h"

#include "tests/file_support.h"

namespace shardproof::verify {
namespace {

using tests::contains;

constexpr comm::MeshShape kMesh{3, 1, 2};  // ranks 0 1, 2 3, 4 5

TEST_CASE("rng check: alike within a replica, different between replicas", "[verify][rng]") {
  const CheckResult right = check_rng(kMesh, {7, 7, 8, 8, 9, 9});
  CHECK(right.name == "rng");
  CHECK(right.status == Status::kPass);
  CHECK(check_rng({1, 1, 1}, {5}).status == Status::kPass);
  CHECK(check_rng({1, 2, 2}, {5, 5, 5, 5}).status == Status::kPass);
  CHECK(check_rng({4, 1, 1}, {1, 2, 3, 4}).status == Status::kPass);
}

TEST_CASE("rng check: one rank that drew more or less", "[verify][rng]") {
  const CheckResult wrong = check_rng(kMesh, {7, 7, 8, 6, 9, 9});
  CHECK(wrong.status == Status::kFail);
  CHECK(contains(wrong.detail, "ranks 2 and 3"));
  CHECK(check_rng({1, 2, 2}, {5, 5, 5, 4}).status == Status::kFail);
}

TEST_CASE("rng check: replicas with the same stream", "[verify][rng]") {
  for (const auto& [fingerprints, ranks] :
       {std::pair(std::vector<uint64_t>{7, 7, 7, 7, 9, 9}, "replicas 0 and 1"),
        std::pair(std::vector<uint64_t>{7, 7, 8, 8, 7, 7}, "replicas 0 and 2"),
        std::pair(std::vector<uint64_t>{7, 7, 8, 8, 8, 8}, "replicas 1 and 2")}) {
    const CheckResult wrong = check_rng(kMesh, fingerprints);
    CHECK(wrong.status == Status::kFail);
    CHECK(contains(wrong.detail, ranks));
  }
}

TEST_CASE("rng check: a fingerprint for every rank", "[verify][rng]") {
  tests::error_text([] { check_rng(kMesh, {7, 7, 8, 8, 9}); }, ErrorKind::kInternal);
}

}  // namespace
}  // namespace shardproof::verify
