// The moving average is the formula's, element by element, and continues where it stopped.
#include "fsdp/moving_average.h"

#include <cmath>
#include <limits>

#include "tests/file_support.h"
#include "tests/fsdp/shard_support.h"

namespace shardproof::fsdp {
namespace {

using at::Tensor;
using tests::contains;
using tests::error_text;
using tests::normal;
using tests::shard_of;
using tests::to_doubles;

at::Generator generator(uint64_t seed) { return at::make_generator<at::CPUGeneratorImpl>(seed); }

TEST_CASE("the average follows the formula, from a copy of the first value") {
  const auto [dtype, tolerance] =
      GENERATE(std::pair(at::kDouble, 1e-15), std::pair(at::kFloat, 1e-6));
  const double decay = GENERATE(0.0, 0.3, 0.99);
  at::Generator random = generator(3);
  const Tensor value = normal({7, 3}, dtype, random);
  std::vector<double> expected = to_doubles(value);
  MovingAverage average(decay);
  CHECK(average.averages().empty());
  average.update({{"w", value, {}}});
  for (int step = 0; step < 5; ++step) {
    value.copy_(normal({7, 3}, dtype, random));
    average.update({{"w", value, {}}});
    const std::vector<double> now = to_doubles(value);
    for (size_t i = 0; i < now.size(); ++i) {
      expected[i] = decay * expected[i] + (1 - decay) * now[i];
    }
  }
  const Tensor got = average.averages().at("w");
  CHECK(got.scalar_type() == dtype);
  const std::vector<double> numbers = to_doubles(got);
  for (size_t i = 0; i < numbers.size(); ++i) {
    INFO(i);
    CHECK(std::abs(numbers[i] - expected[i]) <= tolerance);
  }
}

TEST_CASE("the average of a shard is the rows of the whole's average") {
  const at::ScalarType dtype = GENERATE(at::kDouble, at::kFloat, at::kBFloat16);
  const int64_t rows = GENERATE(1, 7, 37);
  at::Generator random = generator(4);
  MovingAverage whole(0.9);
  std::vector<MovingAverage> shards(3, MovingAverage(0.9));
  for (int step = 0; step < 3; ++step) {
    const Tensor value = normal({rows, 13}, dtype, random);
    whole.update({{"w", value, {}}});
    for (int i = 0; i < 3; ++i) shards[i].update({{"w", shard_of(value, i, 3), {}}});
  }
  std::vector<Tensor> parts;
  for (const MovingAverage& shard : shards) parts.push_back(shard.averages().at("w"));
  CHECK(at::equal(at::cat(parts), whole.averages().at("w")));
}

TEST_CASE("a restored average continues as if it had not stopped") {
  at::Generator random = generator(5);
  MovingAverage straight(0.9), stopped(0.9), restored(0.9);
  for (int step = 0; step < 4; ++step) {
    const Tensor value = normal({5}, at::kFloat, random);
    straight.update({{"w", value, {}}});
    (step < 2 ? stopped : restored).update({{"w", value, {}}});
    if (step == 1) restored.restore(stopped.averages());
  }
  CHECK(at::equal(restored.averages().at("w"), straight.averages().at("w")));
}

TEST_CASE("a moving average refuses what it cannot average") {
  for (const double decay : {-0.1, 1.0, std::numeric_limits<double>::quiet_NaN()}) {
    CHECK(contains(error_text([&] { MovingAverage average(decay); }), "[0, 1)"));
  }
  MovingAverage average(0.5);
  average.update({{"w", at::ones({3}), {}}});
  const auto refusal = [&](const TrainedTensor& tensor) {
    return error_text([&] { average.update({tensor}); }, ErrorKind::kInternal);
  };
  CHECK(contains(refusal({"b", at::ones({3}), {}}), "b has no average"));
  CHECK(contains(refusal({"w", at::ones({4}), {}}), "w is [4]"));
  CHECK(contains(refusal({"w", at::ones({3}, at::kDouble), {}}), "Double"));
}

}  // namespace
}  // namespace shardproof::fsdp
