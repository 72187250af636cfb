#include "comm/random_streams.h"

#include <ATen/ATen.h>

#include <set>

#include "tests/catch.h"

namespace shardproof::comm {
namespace {

using at::Tensor;

struct Draws {
  Tensor replica, rank;
  uint64_t fingerprint = 0;  // after the draws
};

Draws draw(uint64_t seed, const MeshShape& shape, int world_rank) {
  RandomStreams streams(seed, shape, world_rank, at::kCPU);
  Draws draws;
  draws.replica = at::randn({100}, streams.replica(), at::kDouble);
  draws.rank = at::randn({100}, streams.rank(), at::kDouble);
  draws.fingerprint = streams.replica_fingerprint();
  return draws;
}

// Independent standard normal draws of 100 numbers: the correlation is within 0.5 (5 sigma).
bool unrelated(const Tensor& a, const Tensor& b) {
  return std::abs((a * b).mean().item<double>()) < 0.5;
}

}  // namespace

TEST_CASE("SP ranks of a replica share one stream, replicas and ranks do not", "[random]") {
  const MeshShape shape{2, 2, 2};
  std::vector<Draws> draws;
  for (int r = 0; r < shape.world(); ++r) draws.push_back(draw(7, shape, r));
  for (int a = 0; a < shape.world(); ++a) {
    const Draws& one = draws[static_cast<size_t>(a)];
    CHECK(unrelated(one.replica, one.rank));
    for (int b = 0; b < a; ++b) {
      const Draws& other = draws[static_cast<size_t>(b)];
      INFO("ranks " << a << " and " << b);
      const bool same_replica = a / 4 == b / 4;
      CHECK(at::equal(one.replica, other.replica) == same_replica);
      CHECK((one.fingerprint == other.fingerprint) == same_replica);
      if (!same_replica) CHECK(unrelated(one.replica, other.replica));
      CHECK(unrelated(one.rank, other.rank));
      CHECK(unrelated(one.rank, other.replica));
    }
  }
}

TEST_CASE("the same seed gives the same numbers, another seed gives others", "[random]") {
  const MeshShape shape{1, 1, 2};
  CHECK(at::equal(draw(7, shape, 1).replica, draw(7, shape, 1).replica));
  CHECK(at::equal(draw(7, shape, 1).rank, draw(7, shape, 1).rank));
  CHECK(unrelated(draw(7, shape, 1).replica, draw(8, shape, 1).replica));
  CHECK(unrelated(draw(7, shape, 1).rank, draw(8, shape, 1).rank));
}

TEST_CASE("a replica draws the same numbers however its sequence is cut", "[random]") {
  const Draws whole = draw(7, {2, 1, 1}, 1);
  for (const int sp : {2, 4}) {
    for (int r = 0; r < sp; ++r) {
      CHECK(at::equal(draw(7, {2, 1, sp}, sp + r).replica, whole.replica));
      CHECK(at::equal(draw(7, {2, sp, 1}, sp + r).replica, whole.replica));
    }
  }
}

TEST_CASE("the fingerprint tells who has drawn more", "[random]") {
  RandomStreams a(7, {1, 1, 2}, 0, at::kCPU), b(7, {1, 1, 2}, 1, at::kCPU);
  CHECK(a.replica_fingerprint() == b.replica_fingerprint());
  at::randn({1}, a.replica(), at::kDouble);
  CHECK(a.replica_fingerprint() != b.replica_fingerprint());
  at::randn({1}, b.rank(), at::kDouble);  // a stream of its own
  CHECK(a.replica_fingerprint() != b.replica_fingerprint());
  at::randn({1}, b.replica(), at::kDouble);
  CHECK(a.replica_fingerprint() == b.replica_fingerprint());
}

TEST_CASE("derived seeds do not meet", "[random]") {
  std::set<uint64_t> seeds;
  for (uint64_t seed = 0; seed < 50; ++seed) {
    for (uint64_t stream = 0; stream < 50; ++stream) {
      seeds.insert(derive_seed(seed, stream));
      seeds.insert(derive_seed(seed, stream + (uint64_t{1} << 32)));
    }
  }
  CHECK(seeds.size() == 5000);
}

TEST_CASE("streams that have a name: the published values of FNV-1a", "[random]") {
  CHECK(derive_seed(5, "a") == derive_seed(5, 0xaf63dc4c8601ec8cull));
  CHECK(derive_seed(5, "foobar") == derive_seed(5, 0x85944171f73967e8ull));
}

}  // namespace shardproof::comm
