// Parameters in shards: gradients are those of the whole, memory is what the shards need, and every
// rank makes the same calls.
#include "fsdp/fully_sharded.h"

#include "tests/catch.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <memory>

#include "sim/world.h"
#include "tests/file_support.h"
#include "tests/fsdp/shard_support.h"

namespace shardproof::fsdp {
namespace {

using at::Tensor;
using tests::contains;
using tests::error_text;
using tests::on_device;

constexpr int64_t kWidth = 64;
const std::vector<std::string> kBlocks = {"blocks.0", "blocks.1", "blocks.2"};

// Three blocks of one square matrix, and a root with a matrix of 5 rows, a scalar and a buffer.
models::ParameterSet whole_parameters() {
  std::vector<models::ParameterSpec> specs = {{"in.weight", {kWidth, 5}}, {"scale", {}}};
  for (const std::string& block : kBlocks) specs.push_back({block + ".weight", {kWidth, kWidth}});
  specs.push_back({"table", {7}, /*buffer=*/true});
  models::ParameterSet whole(specs);
  double at = 0;
  for (const auto& spec : specs) {
    const int64_t n = c10::multiply_integers(spec.shape);
    const Tensor x = (at::arange(n, at::kDouble) + 100 * ++at).sin() / 4;
    whole.set(spec.name, x.view(spec.shape));
  }
  return whole;
}

Tensor input_of(int rank) {
  return (at::arange(3 * 5, at::kDouble) * (rank + 1)).cos().view({3, 5});
}

// A loss of all parameters; blocks from `skip` on do not see a gradient.
Tensor loss_of(const models::ParameterSet& parameters, models::BlockUnits* units, int rank,
               bool stop) {
  Tensor x = at::matmul(input_of(rank).to(parameters["in.weight"].options().requires_grad(false)),
                        parameters["in.weight"].t());
  for (const std::string& name : kBlocks) {
    const models::Block block = [&](const std::vector<Tensor>& in) {
      return std::vector<Tensor>{at::tanh(at::matmul(in[0], parameters[name + ".weight"]))};
    };
    x = (units ? units->run(name, block, {x}) : block({x}))[0];
    if (stop && name == "blocks.1") x = x.detach();
  }
  return (x * parameters["scale"]).square().sum().to(at::kDouble);
}

// The mean over ranks of each one's gradient.
std::map<std::string, Tensor> expected_gradients(int ranks, int stopping) {
  std::map<std::string, Tensor> grads;
  for (int r = 0; r < ranks; ++r) {
    const models::ParameterSet leaves = whole_parameters().leaves(at::kDouble, at::kCPU);
    torch::autograd::backward({loss_of(leaves, nullptr, r, r == stopping)}, {});
    for (const auto& [name, leaf] : leaves.trained()) {
      const Tensor grad = leaf.grad().defined() ? leaf.grad() : at::zeros_like(leaf);
      grads[name] = grads.contains(name) ? grads[name] + grad : grad;
    }
  }
  for (auto& [name, grad] : grads) grad = grad / ranks;
  return grads;
}

// What FullySharded needs, kept on a rank.
struct Rank {
  Rank(sim::RankContext& context, int shards, const Policy& policy)
      : Rank(context, shards, policy, whole_parameters()) {}
  Rank(sim::RankContext& context, int shards, const Policy& policy,
       const models::ParameterSet& whole)
      : mesh(context, shards), sharded(kBlocks, whole, mesh, policy) {}
  void step(int rank, bool stop, bool synchronize = true) {
    sharded.gather_root();
    sharded.backward(loss_of(sharded.parameters(), &sharded, rank, stop), synchronize);
  }
  comm::FsdpMesh mesh;
  FullySharded sharded;
};

// Of gradients of size 1. A GPU's sums have another order than the reference's on the CPU.
double rounding() { return tests::device().is_cuda() ? 1e-13 : 1e-15; }

struct Setup {
  int ranks, shards;
  Policy policy;
  int stopping;
};

void check_gradients(const Setup& s) {
  sim::World world(s.ranks, on_device());
  const auto expected = expected_gradients(s.ranks, s.stopping);
  std::mutex checking;
  world.run([&](sim::RankContext& context) {
    Rank rank(context, s.shards, s.policy);
    rank.step(context.rank(), context.rank() == s.stopping);
    const int index = rank.mesh.shards().rank();
    const std::lock_guard lock(checking);
    for (const TrainedTensor& tensor : rank.sharded.trained()) {
      Tensor whole = expected.at(tensor.name);
      if (whole.dim() == 0) whole = whole.view({1});
      const auto rows = ShardLayout{whole.size(0), tensor.replicated ? 1 : s.shards}.shard(
          tensor.replicated ? 0 : index);
      const Tensor mine = whole.narrow(0, rows.begin, rows.size());
      INFO(tensor.name << " rank " << context.rank());
      CHECK(at::allclose(tensor.grad.cpu(), mine, 1e-13, rounding()));
    }
  });
}

TEST_CASE("fully sharded: gradients are the mean of the ranks'", "[fsdp]") {
  Policy plain = Policy::uniform(at::kDouble);
  Policy kept = plain;
  kept.reshard_after_forward = false;
  Policy lazy = plain;
  lazy.prefetch = false;
  Policy replicated = plain;
  replicated.replicated = [](const std::string& name) { return name == "blocks.1.weight"; };
  for (const Policy& policy : {plain, kept, lazy, replicated}) {
    for (const auto& [ranks, shards] : {std::pair{1, 1}, {2, 2}, {3, 3}, {4, 2}, {2, 1}}) {
      check_gradients({ranks, shards, policy, -1});
      check_gradients({ranks, shards, policy, ranks - 1});  // one rank's graph ends early
    }
  }
}

TEST_CASE("fully sharded: deferred gradients add up", "[fsdp]") {
  for (const bool deferred : {false, true}) {
    sim::World world(2, on_device());
    std::vector<std::map<std::string, Tensor>> grads(2);
    world.run([&](sim::RankContext& context) {
      Rank rank(context, 2, Policy::uniform(at::kDouble));
      rank.step(context.rank(), false, !deferred);
      rank.step(context.rank(), false);
      for (const auto& t : rank.sharded.trained()) {
        grads[static_cast<size_t>(context.rank())][t.name] = t.grad.cpu();
      }
    });
    const auto once = expected_gradients(2, -1);
    for (const auto& [name, grad] : once) {
      if (grad.dim() == 0) continue;
      INFO(name);
      CHECK(
          at::allclose(at::cat({grads[0][name], grads[1][name]}, 0), 2 * grad, 1e-13, rounding()));
    }
    size_t reductions = 0;
    for (const CollectiveCall& call : world.calls(0)) {
      reductions += call.kind == CallKind::kReduceScatter ? 1 : 0;
    }
    CHECK(reductions == (deferred ? 5 : 10));  // three blocks, the root's matrix and scalar
  }
}

// Between steps: the shards and their gradients, and nothing else. On the CPU: what CUDA's
// allocator reports is rounded up.
TEST_CASE("fully sharded: what stays is the shards", "[fsdp]") {
  for (const bool offload : {false, true}) {
    sim::WorldOptions options;
    options.track_memory = true;
    sim::World world(4, options);
    std::vector<std::unique_ptr<Rank>> ranks(4);
    Policy policy = Policy::mixed();
    policy.offload = offload;
    const models::ParameterSet whole = whole_parameters();  // not the ranks' memory
    world.run([&](sim::RankContext& context) {
      auto rank = std::make_unique<Rank>(context, 4, policy, whole);
      rank->step(context.rank(), false);
      rank->step(context.rank(), false);
      ranks[static_cast<size_t>(context.rank())] = std::move(rank);
    });
    // Rows of every rank, pads included: 16 of each square, 16 of the input, the scalar.
    const int64_t elements = 3 * 16 * kWidth + 16 * 5 + 1;
    const int64_t buffer = 7 * 2;  // in the param dtype
    const int64_t grads_without_pad = elements;
    const int64_t expected = 4 * elements + 4 * grads_without_pad + buffer;
    const sim::MemoryUse use = world.memory(0);
    CHECK(use.current == expected);
    // While one block computes, the next one is there, too; gradients of one travel in fp32.
    const int64_t block = kWidth * kWidth;
    const int64_t root = kWidth * 5 + 4 + 7;
    const int64_t activations = 20 * 3 * kWidth * 4;
    CHECK(use.peak > expected + 2 * block * 2);
    CHECK(use.peak < expected + 2 * (2 * block + root) + 2 * block + 3 * 4 * block + activations);
    ranks.clear();
  }
}

TEST_CASE("fully sharded: a parameter that is not there is not read", "[fsdp]") {
  sim::World world(2, on_device());
  world.run([&](sim::RankContext& context) {
    Rank rank(context, 2, Policy::uniform(at::kDouble));
    if (context.rank() != 0) return;  // assertions are not for two threads at once
    CHECK(contains(
        error_text([&] { rank.sharded.parameters()["blocks.0.weight"]; }, ErrorKind::kInternal),
        "'blocks.0.weight' is read while only its shards are there"));
  });
}

TEST_CASE("fully sharded: all is put together for export", "[fsdp]") {
  sim::World world(4, on_device());
  world.run([&](sim::RankContext& context) {
    Rank rank(context, 2, Policy::uniform(at::kDouble));
    const models::ParameterSet whole = whole_parameters();
    const models::ParameterSet gathered = rank.sharded.gather_all();
    if (context.rank() != 3) return;
    for (const auto& spec : whole.specs()) {
      INFO(spec.name);
      CHECK(at::equal(gathered[spec.name], whole[spec.name]));
    }
  });
}

TEST_CASE("fully sharded: shards that do not divide the world", "[fsdp]") {
  sim::World world(3, on_device());
  world.run([&](sim::RankContext& context) {
    if (context.rank() != 0) return;
    CHECK(contains(error_text([&] { comm::FsdpMesh(context, 2); }), "fsdp 2: expected"));
  });
}

TEST_CASE("shard layout: every row once, chunks as large as the first", "[fsdp]") {
  for (const int64_t rows : {1, 3, 10, 64}) {
    for (const int shards : {1, 2, 4, 7}) {
      const ShardLayout layout{rows, shards};
      int64_t next = 0;
      for (int i = 0; i < shards; ++i) {
        CHECK(layout.shard(i).begin == std::min(next, rows));
        CHECK(layout.shard(i).size() <= layout.chunk());
        next = layout.shard(i).end;
      }
      CHECK(next == rows);
    }
  }
  CHECK(ShardLayout{10, 4}.shard(3).size() == 1);  // as torch.chunk: 3, 3, 3, 1
  CHECK(ShardLayout{3, 4}.shard(3).size() == 0);
}

}  // namespace
}  // namespace shardproof::fsdp
