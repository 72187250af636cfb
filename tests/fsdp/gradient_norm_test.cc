// The norm of shards on ranks is the whole's, on every rank alike, also when it is not finite.
#include "fsdp/gradient_norm.h"

#include <cmath>
#include <limits>

#include "base/error.h"
#include "comm/mesh.h"
#include "sim/world.h"
#include "tests/file_support.h"
#include "tests/fsdp/shard_support.h"

namespace shardproof::fsdp {
namespace {

using at::Tensor;
using tests::contains;
using tests::device;
using tests::error_text;
using tests::normal;
using tests::on_device;
using tests::shard_of;
using tests::to_doubles;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

at::Generator generator(uint64_t seed) { return at::make_generator<at::CPUGeneratorImpl>(seed); }

// Whole gradients; the last one is replicated, [1, 3] leaves ranks without rows.
std::vector<Tensor> whole_gradients() {
  at::Generator random = generator(11);
  return {normal({7, 5}, at::kFloat, random), normal({1, 3}, at::kFloat, random),
          normal({4}, at::kDouble, random), normal({5, 2}, at::kBFloat16, random),
          normal({6}, at::kFloat, random)};
}

std::vector<TrainedTensor> tensors_of_rank(const std::vector<Tensor>& whole, int rank, int ranks) {
  std::vector<TrainedTensor> tensors;
  for (size_t i = 0; i < whole.size(); ++i) {
    const bool replicated = i + 1 == whole.size();
    const Tensor grad = replicated ? whole[i].clone() : shard_of(whole[i], rank, ranks);
    tensors.push_back({fmt::format("p{}", i), at::zeros_like(grad), grad, replicated});
  }
  return tensors;
}

double norm_of(const std::vector<Tensor>& whole) {
  double squares = 0;
  for (const Tensor& x : whole) {
    for (const double number : to_doubles(x)) squares += number * number;
  }
  return std::sqrt(squares);
}

// What each rank computes; `prepare` may change its tensors.
std::vector<double> norms_on(
    int ranks, const std::vector<Tensor>& whole,
    const std::function<void(int rank, std::vector<TrainedTensor>&)>& prepare = {}) {
  std::vector<double> norms(ranks);
  sim::World world(ranks, on_device());
  world.run([&](sim::RankContext& rank) {
    const comm::Mesh mesh(rank, {.dp = ranks});
    std::vector<TrainedTensor> tensors = tensors_of_rank(whole, rank.rank(), ranks);
    if (prepare) prepare(rank.rank(), tensors);
    norms[rank.rank()] = gradient_norm(tensors, mesh.dp(), device());
  });
  for (int rank = 0; rank < ranks; ++rank) CHECK(world.calls(rank).size() == (ranks > 1 ? 1 : 0));
  return norms;
}

TEST_CASE("the norm of shards and a replicated tensor is the whole's") {
  const int ranks = GENERATE(1, 2, 3);
  const std::vector<Tensor> whole = whole_gradients();
  const std::vector<double> norms = norms_on(ranks, whole);
  INFO(ranks << " ranks");
  CHECK(std::abs(norms[0] / norm_of(whole) - 1) < 1e-14);
  for (const double norm : norms) CHECK(norm == norms[0]);
}

TEST_CASE("the norm of known numbers") {
  const auto single = [](const Tensor& numbers) {
    const Tensor grad = numbers.to(device());
    return gradient_norm({{"w", at::zeros_like(grad), grad}}, comm::Communicator(), device());
  };
  CHECK(single(at::tensor({3.0, 4.0})) == Approx(5).epsilon(1e-15));
  // Squares beyond fp32, and ones that a sum in fp32 would lose.
  CHECK(single(at::full({4}, 1e30, at::kFloat)) == Approx(2e30).epsilon(1e-7));
  const Tensor small = at::full({1000001}, 0x1p-13, at::kFloat);
  small[0] = 1;
  CHECK(single(small) == Approx(std::sqrt(1 + 1e6 * 0x1p-26)).epsilon(1e-12));
  CHECK(single(at::zeros({0, 3})) == 0);
  CHECK(gradient_norm({}, comm::Communicator(), device()) == 0);
}

TEST_CASE("a gradient that is not finite on one rank reaches all") {
  const double poison = GENERATE(kInfinity, kNan);
  const size_t tensor = GENERATE(0, 4);  // sharded, replicated
  const std::vector<double> norms =
      norms_on(3, whole_gradients(), [&](int rank, std::vector<TrainedTensor>& tensors) {
        if (rank == 1) tensors[tensor].grad.view(-1)[0] = poison;
      });
  INFO("tensor " << tensor);
  for (const double norm : norms) CHECK((std::isnan(poison) ? std::isnan(norm) : norm == poison));
}

TEST_CASE("copies of a replicated gradient that differ give one norm") {
  const std::vector<double> norms = norms_on(
      3, whole_gradients(),
      [](int rank, std::vector<TrainedTensor>& tensors) { tensors.back().grad.mul_(1 + rank); });
  for (const double norm : norms) CHECK(norm == norms[0]);
}

TEST_CASE("clipping scales to the largest norm, as torch's clip_grad_norm_") {
  const double max_norm = GENERATE(0.5, 2.0);
  std::vector<TrainedTensor> tensors = tensors_of_rank(whole_gradients(), 0, 1);
  const std::vector<TrainedTensor> before = tensors_of_rank(whole_gradients(), 0, 1);
  const double norm = norm_of(whole_gradients());
  REQUIRE(norm > max_norm);
  clip_gradients(tensors, norm, max_norm);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor expected = before[i].grad.to(at::kDouble) * (max_norm / (norm + 1e-6));
    INFO(tensors[i].name);
    CHECK(at::allclose(tensors[i].grad.to(at::kDouble), expected,
                       tensors[i].grad.scalar_type() == at::kBFloat16 ? 4e-3 : 2e-7, 0));
  }
  // fp64 shows the 1e-6.
  CHECK(at::allclose(tensors[2].grad, before[2].grad * (max_norm / (norm + 1e-6)), 1e-14, 0));
}

TEST_CASE("clipping leaves gradients below the largest norm as they are") {
  std::vector<TrainedTensor> tensors = tensors_of_rank(whole_gradients(), 0, 1);
  const double norm = norm_of(whole_gradients());
  clip_gradients(tensors, norm, 2 * norm);
  for (size_t i = 0; i < tensors.size(); ++i) {
    CHECK(at::equal(tensors[i].grad, whole_gradients()[i]));
  }
}

TEST_CASE("clipping a shard is the rows of clipping the whole") {
  const at::ScalarType dtype = GENERATE(at::kDouble, at::kFloat, at::kBFloat16);
  at::Generator random = generator(12);
  const Tensor whole = normal({37, 13}, dtype, random);
  std::vector<Tensor> parts;
  for (int i = 0; i < 3; ++i) {
    parts.push_back(shard_of(whole, i, 3));
    clip_gradients({{"w", parts[i], parts[i]}}, 3, 1);
  }
  clip_gradients({{"w", whole, whole}, {"empty", at::zeros({0}), at::zeros({0})}}, 3, 1);
  CHECK(at::equal(at::cat(parts), whole));
}

TEST_CASE("clipping refuses norms that are not finite") {
  const Tensor grad = at::ones({2});
  for (const double norm : {kInfinity, kNan}) {
    CHECK(contains(error_text(
                       [&] {
                         clip_gradients({{"w", grad, grad}}, norm, 1);
                       },
                       ErrorKind::kInternal),
                   "gradient norm"));
  }
  CHECK(contains(error_text(
                     [&] {
                       gradient_norm({{"w", grad, {}}}, comm::Communicator(), at::kCPU);
                     },
                     ErrorKind::kInternal),
                 "w has no gradient"));
}

}  // namespace
}  // namespace shardproof::fsdp
