// In which order and type sums are taken: bit by bit, as a ring of NCCL would or as ranks count.
#include <cmath>

#include "tests/sim/engine/watchdog.h"
#include "tests/sim/tensor_support.h"

namespace shardproof::sim {
namespace {

using at::Tensor;
using comm::Communicator;
using comm::Reduce;
using tests::same;
using tests::Watchdog;
using tests::whole_world;

// Results of all ranks.
std::vector<Tensor> run_in_order(ReduceOrder order, int ranks,
                                 const std::function<Tensor(const Communicator&)>& program) {
  Watchdog watchdog;
  WorldOptions options;
  options.reduce_order = order;
  World world(ranks, options);
  std::vector<Tensor> results(static_cast<size_t>(ranks));
  world.run([&](RankContext& rank) {
    results[static_cast<size_t>(rank.rank())] = program(whole_world(rank));
  });
  return results;
}

// Elements that rank r contributes: signs and sizes mixed so that the order shows in every dtype.
std::vector<float> contribution(int rank, int64_t n) {
  std::vector<float> values;
  for (int64_t i = 0; i < n; ++i) {
    const auto noise = static_cast<float>((rank * 7919 + i * 104729) % 1009) / 37.0f;
    values.push_back(((rank + i) % 2 == 0 ? 1.0f : -1.0f) * (noise + 0.01f * noise * noise));
  }
  return values;
}

Tensor as_tensor(const std::vector<float>& values, at::ScalarType type) {
  return at::tensor(values, at::kFloat).to(type);
}

float to_bf16(float x) { return static_cast<float>(c10::BFloat16(x)); }

// Element i over all ranks by hand: beginning at `first`, rounded to bf16 at every hop.
float ring_sum(int ranks, int64_t i, int first, int64_t n) {
  float sum = to_bf16(contribution(first % ranks, n)[static_cast<size_t>(i)]);
  for (int hop = 1; hop < ranks; ++hop) {
    sum = to_bf16(sum + to_bf16(contribution((first + hop) % ranks, n)[static_cast<size_t>(i)]));
  }
  return sum;
}

// In rank order in fp32, rounded once.
float rank_sum(int ranks, int64_t i, int64_t n) {
  float sum = 0;
  for (int r = 0; r < ranks; ++r) sum += to_bf16(contribution(r, n)[static_cast<size_t>(i)]);
  return to_bf16(sum);
}

}  // namespace

TEST_CASE("three numbers whose sum depends on the order", "[reduce_order]") {
  // In bf16 1 + 2^-8 is 1 (a tie that goes to even), but 2^-8 + 2^-8 is 2^-7, and 1 + 2^-7 is
  // not 1.
  const auto scatter = [](const Communicator& group) {
    const double mine = group.rank() == 0 ? 1.0 : 1.0 / 256;
    return group.reduce_scatter(at::full({3}, mine, at::kBFloat16), {1, 1, 1}).wait();
  };
  const auto by_rank = run_in_order(ReduceOrder::kRank, 3, scatter);
  const auto by_ring = run_in_order(ReduceOrder::kNcclRing, 3, scatter);
  for (const Tensor& x : by_rank) CHECK(x.item<double>() == 1 + 1.0 / 128);
  CHECK(by_ring[0].item<double>() == 1 + 1.0 / 128);  // (rank 1 + rank 2) + rank 0
  CHECK(by_ring[1].item<double>() == 1);              // (rank 2 + rank 0) + rank 1
  CHECK(by_ring[2].item<double>() == 1);              // (rank 0 + rank 1) + rank 2
}

TEST_CASE("bf16 sums equal those computed by hand", "[reduce_order]") {
  for (const int ranks : {2, 3, 4, 5}) {
    const int64_t share = 4, n = share * ranks;
    const auto scatter = [&](const Communicator& group) {
      const Tensor mine = as_tensor(contribution(group.rank(), n), at::kBFloat16);
      return group.reduce_scatter(mine, std::vector<int64_t>(static_cast<size_t>(ranks), share))
          .wait();
    };
    const auto by_rank = run_in_order(ReduceOrder::kRank, ranks, scatter);
    const auto by_ring = run_in_order(ReduceOrder::kNcclRing, ranks, scatter);
    int differ = 0;
    for (int r = 0; r < ranks; ++r) {
      for (int64_t k = 0; k < share; ++k) {
        const int64_t i = r * share + k;
        const auto at = static_cast<size_t>(r);
        INFO(ranks << " ranks, element " << i);
        REQUIRE(by_rank[at][k].item<float>() == rank_sum(ranks, i, n));
        REQUIRE(by_ring[at][k].item<float>() == ring_sum(ranks, i, r + 1, n));
        differ += by_rank[at][k].item<float>() != by_ring[at][k].item<float>();
      }
    }
    CHECK((ranks == 2 ? differ == 0 : differ > 0));
  }
}

TEST_CASE("an all-reduce is a reduce-scatter and an all-gather, also where it does not divide",
          "[reduce_order]") {
  for (const int64_t n : {1, 2, 3, 7, 12}) {
    const int ranks = 3;
    const auto reduce = [&](const Communicator& group) {
      return group.all_reduce(as_tensor(contribution(group.rank(), n), at::kBFloat16)).wait();
    };
    const auto by_rank = run_in_order(ReduceOrder::kRank, ranks, reduce);
    const auto by_ring = run_in_order(ReduceOrder::kNcclRing, ranks, reduce);
    const int64_t chunk = (n + ranks - 1) / ranks;
    for (int64_t i = 0; i < n; ++i) {
      INFO(n << " elements, element " << i);
      CHECK(by_rank[0][i].item<float>() == rank_sum(ranks, i, n));
      CHECK(by_ring[0][i].item<float>() == ring_sum(ranks, i, static_cast<int>(i / chunk) + 1, n));
    }
    for (const auto& results : {by_rank, by_ring}) {  // the same bits on every rank
      CHECK(same(results[0], results[1]));
      CHECK(same(results[0], results[2]));
    }
  }
}

TEST_CASE("fp32 is summed in fp32, fp64 in fp64, in either order", "[reduce_order]") {
  // 1 + e == 1, but e + e is not lost; e is half the distance to the next number.
  const auto sum_of = [](ReduceOrder order, at::ScalarType type, double e) {
    return run_in_order(
               order, 3,
               [&](const Communicator& group) {
                 return group.all_reduce(at::full({1}, group.rank() == 0 ? 1.0 : e, type)).wait();
               })[0]
        .item<double>();
  };
  const double e32 = std::ldexp(1.0, -24), e64 = std::ldexp(1.0, -53);
  CHECK(sum_of(ReduceOrder::kRank, at::kFloat, e32) == 1);
  CHECK(sum_of(ReduceOrder::kNcclRing, at::kFloat, e32) == 1 + 2 * e32);
  CHECK(sum_of(ReduceOrder::kRank, at::kDouble, e64) == 1);
  CHECK(sum_of(ReduceOrder::kNcclRing, at::kDouble, e64) == 1 + 2 * e64);
  CHECK(sum_of(ReduceOrder::kRank, at::kDouble, e32) == 1 + 2 * e32);
}

TEST_CASE("large integers are summed exactly", "[reduce_order]") {
  const int64_t large = (int64_t{1} << 53) + 1;  // no fp64 number
  for (const ReduceOrder order : {ReduceOrder::kRank, ReduceOrder::kNcclRing}) {
    const auto sums = run_in_order(order, 3, [&](const Communicator& group) {
      return group.all_reduce(at::full({2}, large, at::kLong)).wait();
    });
    CHECK(same(sums[1], at::full({2}, 3 * large, at::kLong)));
  }
}

TEST_CASE("maxima do not depend on the order, NaN wins", "[reduce_order]") {
  const double nan = std::nan("");
  for (const ReduceOrder order : {ReduceOrder::kRank, ReduceOrder::kNcclRing}) {
    const auto maxima = run_in_order(order, 3, [&](const Communicator& group) {
      const int r = group.rank();
      const Tensor mine = at::tensor({r * 1.0, -r - 1.0, r == 1 ? nan : 5.0}, at::kDouble);
      return group.all_reduce(mine, Reduce::kMax).wait();
    });
    for (const Tensor& x : maxima) CHECK(same(x, at::tensor({2.0, -1.0, nan}, at::kDouble)));
  }
}

}  // namespace shardproof::sim
