// gather_rows and its three adjoints.
#include "comm/differentiable.h"

#include "tests/sim/tensor_support.h"

#include <torch/csrc/autograd/autograd.h>

namespace shardproof::comm {
namespace {

using at::Tensor;
using tests::expect;
using tests::expect_same;
using tests::whole_world;

const std::vector<int64_t> kRows = {2, 0, 3};

Tensor own(int rank, at::ScalarType type) {
  return at::arange(2 * kRows[static_cast<size_t>(rank)] * 2, at::kDouble)
      .view({2, kRows[static_cast<size_t>(rank)], 2})
      .add(100.0 * rank)
      .to(type);
}

// Rank r's cotangent: (r + 1) everywhere.
void run(GatherAdjoint adjoint, at::ScalarType type, const std::vector<double>& expected) {
  sim::World world(3);
  world.run([&](sim::RankContext& rank) {
    const Communicator group = whole_world(rank, "sp");
    const int r = rank.rank();
    const Tensor x = own(r, type).requires_grad_();
    const Tensor all = gather_rows(x, group, kRows, adjoint, "text.gather");
    expect_same(all.detach(), at::cat({own(0, type), own(1, type), own(2, type)}, 1), "gathered");
    torch::autograd::backward({all}, {at::full_like(all, r + 1.0)});
    expect_same(x.grad(), at::full_like(x, expected[static_cast<size_t>(r)]), "gradient");
  });
  for (const CollectiveCall& call : world.calls(0)) expect(call.group == "sp", "its group");
  const bool sums = adjoint == GatherAdjoint::kSum;
  CHECK(world.calls(0).size() == (sums ? 2 : 1));
  CHECK(world.calls(0)[0].tag == "text.gather");
  if (sums) CHECK(world.calls(0)[1].tag == "text.gather'");
}

TEST_CASE("gather: the adjoint takes its own rows", "[comm]") {
  run(GatherAdjoint::kOwnSlice, at::kDouble, {1, 2, 3});
}

TEST_CASE("gather: the adjoint takes its own rows, times the ranks", "[comm]") {
  run(GatherAdjoint::kOwnSliceTimes, at::kDouble, {3, 6, 9});
}

TEST_CASE("gather: the adjoint sums over ranks", "[comm]") {
  run(GatherAdjoint::kSum, at::kDouble, {6, 6, 6});
}

TEST_CASE("gather: 16-bit cotangents are summed in fp32", "[comm]") {
  run(GatherAdjoint::kSum, at::kBFloat16, {6, 6, 6});
  sim::World world(3);
  world.run([](sim::RankContext& rank) {
    const Communicator group = whole_world(rank, "sp");
    const Tensor x = at::zeros({1, 1, 1}, at::kBFloat16).requires_grad_();
    const Tensor all = gather_rows(x, group, {1, 1, 1}, GatherAdjoint::kSum, "g");
    // 256 + 1 is 256 in bf16; 256 + 1 + 1 = 258 is held.
    const double mine = rank.rank() == 0 ? 256 : 1;
    torch::autograd::backward({all}, {at::full_like(all, mine)});
    expect_same(x.grad(), at::full_like(x, 258), "256 + 1 + 1");
  });
  for (const CollectiveCall& call : world.calls(1)) {
    if (call.kind == CallKind::kReduceScatter) CHECK(call.dtype == "Float");
  }
}

TEST_CASE("gather: one rank has nothing to say", "[comm]") {
  const Tensor x = at::ones({1, 2, 3});
  CHECK(gather_rows(x, Communicator(), {2}, GatherAdjoint::kSum, "g").is_same(x));
}

}  // namespace
}  // namespace shardproof::comm
