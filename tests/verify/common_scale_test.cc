// A factor that all gradients share is seen below what a single tensor may be off.
#include "verify/common_scale.h"

#include "tests/catch.h"

namespace shardproof::verify {
namespace {

TensorResult gradient(const char* name, double ratio) {
  TensorResult t;
  t.name = name;
  t.shape = {2, 32, 4, 16};
  t.nonzero = 4096;
  t.reference_error = 4e-3;
  t.ratio = ratio;
  return t;
}

Status status(const std::vector<TensorResult>& tensors, c10::ScalarType dtype) {
  const auto check = check_common_scale(tensors, dtype);
  return check ? check->status : Status::kSkip;
}

TEST_CASE("common scale: all gradients together", "[verify]") {
  const auto all = [](double ratio) {
    return std::vector<TensorResult>{gradient("output", 1), gradient("q:grad", ratio),
                                     gradient("k:grad", ratio), gradient("v:grad", ratio)};
  };
  constexpr auto kLow = c10::ScalarType::BFloat16;
  CHECK(status(all(1.0005), kLow) == Status::kPass);
  CHECK(status(all(1.005), kLow) == Status::kFail);
  CHECK(status(all(0.995), kLow) == Status::kFail);
  // Ratios that scatter around 1 have no common factor.
  CHECK(status({gradient("q:grad", 1.004), gradient("k:grad", 0.996), gradient("v:grad", 1)},
               kLow) == Status::kPass);
  // Masks leave one key of each sample: few elements say little.
  auto masked = all(1.005);
  for (TensorResult& t : masked) t.nonzero = 8;
  CHECK(status(masked, kLow) == Status::kPass);
  // Wider types and cases without gradients have no such check.
  CHECK(status(all(1.005), c10::ScalarType::Float) == Status::kSkip);
  CHECK(status({gradient("output", 2)}, kLow) == Status::kSkip);
  // Of models the allowance is wider, and numbers and later steps do not count.
  CHECK(status({gradient("step0/w.weight:grad", 1.05)}, kLow) == Status::kFail);
  CHECK(status({gradient("step1/w.weight:grad", 1.05)}, kLow) == Status::kSkip);
  CHECK(status({gradient("timestep:grad", 1.05)}, kLow) == Status::kSkip);
}

}  // namespace
}  // namespace shardproof::verify
