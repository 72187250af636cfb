// What the tests of attention share: numbers from a seed, the oracle on tensors, errors.
#pragma once
#include "tests/catch.h"

#include <ATen/ATen.h>

#include <functional>
#include <ostream>
#include <random>
#include <string_view>
#include <vector>

#include "sim/world.h"

namespace shardproof::tests {

// LibTorch has a CHECK of its own that ends the process: the tests must see Catch's.
#define SHARDPROOF_TEXT(...) #__VA_ARGS__
#define SHARDPROOF_EXPANDED(...) SHARDPROOF_TEXT(__VA_ARGS__)
static_assert(std::string_view(SHARDPROOF_EXPANDED(CHECK(true))).find("Catch") !=
              std::string_view::npos);

// Draws from an explicit seed: LibTorch's default generator is shared by all threads.
class Draw {
 public:
  explicit Draw(uint64_t seed);
  int64_t whole(int64_t low, int64_t high);  // both included
  template <class T>
  T one_of(const std::vector<T>& values) {
    return values[static_cast<size_t>(whole(0, static_cast<int64_t>(values.size()) - 1))];
  }
  at::Tensor normal(at::IntArrayRef shape, at::ScalarType dtype = at::kDouble);
  at::Tensor mask(int64_t batch, int64_t keys, double kept);  // bool, true with probability `kept`

 private:
  std::mt19937_64 numbers_;
  at::Generator tensors_;
};

// Attention of whole tensors: q, dout [B,Sq,H,D], k, v [B,Sk,Hk,D], mask bool [B,Sk] or undefined.
struct Problem {
  at::Tensor q, k, v, dout, mask;
  double scale = 1;
};

// fp64, from the Eigen oracle. The `_abs` tensors are the size of what is added up: an error is
// judged against them, as a gradient may cancel to nothing.
struct Solution {
  at::Tensor out, lse, dq, dk, dv;
  at::Tensor out_abs, dq_abs, dk_abs, dv_abs;
};
Solution solve(const Problem& problem);

// A number that a failing check prints as 1.2e-15: Catch prints doubles without an exponent.
struct Small {
  double value;
  operator double() const { return value; }
};
std::ostream& operator<<(std::ostream& out, Small small);

// |x - expected| / |magnitude| in fp64, Euclidean; inf where x holds anything that is not finite.
Small error(const at::Tensor& x, const at::Tensor& expected, const at::Tensor& magnitude);
Small error(const at::Tensor& x, const at::Tensor& expected);  // magnitude = expected
// Largest |x - expected|; two -inf are equal, any other pair that is not finite gives inf.
Small max_abs(const at::Tensor& x, const at::Tensor& expected);

bool all_zero(const at::Tensor& x);

using Tensors = std::vector<at::Tensor>;
// What `fn` returns on each rank of a world (Catch's assertions are for the main thread only).
std::vector<Tensors> on_ranks(sim::World& world,
                              const std::function<Tensors(sim::RankContext&)>& fn);

}  // namespace shardproof::tests
