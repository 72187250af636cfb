// What a rank needs for a training step: activations go with its tokens, parameters, gradients and
// the optimizer's state with its shard. Bytes are those that a virtual rank requests, on the CPU:
// what CUDA's allocator reports is rounded up.
#include "tests/catch.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>

#include "comm/mesh.h"
#include "fsdp/fully_sharded.h"
#include "fsdp/optimizer.h"
#include "sim/world.h"

namespace shardproof::fsdp {
namespace {

using at::Tensor;

constexpr int64_t kGrid = 32, kText = 128, kWidth = 64, kLayers = 4;
constexpr int64_t kFloat = 4;  // bytes

std::unique_ptr<models::Transformer> make_model() {
  return models::make_transformer(
      parse_json(fmt::format(R"({{"_class_name": "QwenImageTransformer2DModel", "num_layers": {},
                      "attention_head_dim": 16, "num_attention_heads": 4, "in_channels": 8,
                      "out_channels": 2, "joint_attention_dim": 12,
                      "axes_dims_rope": [4, 6, 6]}})",
                             kLayers),
                 "memory"));
}

// Whole tensors that do not count: they are made outside of the ranks.
struct Whole {
  Whole() : model(make_model()), parameters(model->parameter_specs()) {
    at::Generator random = at::make_generator<at::CPUGeneratorImpl>(3);
    for (const auto& spec : model->parameter_specs()) {
      parameters.set(spec.name, at::empty(spec.shape, at::kFloat).normal_(0, 0.1, random));
    }
    inputs.hidden_states = at::empty({1, kGrid * kGrid, 8}, at::kFloat).normal_(0, 1, random);
    inputs.encoder_hidden_states = at::empty({1, kText, 12}, at::kFloat).normal_(0, 1, random);
    inputs.timestep = at::full({1}, 0.5, at::kFloat);
    inputs.img_shapes = {{{1, kGrid, kGrid}}};
  }
  int64_t bytes() const { return kFloat * parameters.count(); }

  std::unique_ptr<models::Transformer> model;
  models::ParameterSet parameters;
  models::TransformerInputs inputs;
};

struct Used {
  // By one forward: what its graph keeps, and the most at a time, gathered blocks included.
  int64_t kept = 0, peak = 0;
  // Between steps.
  int64_t parameters = 0, gradients = 0, state = 0;
};

enum class Fault {
  kNone,
  kWholeTokens,     // the first block keeps a tensor of all image tokens, [1,S,C]
  kWholeGradients,  // gradients stay on the rank as they are, in fp32
};

// Of rank 0, whose shards and token shares are the largest.
Used measure(const Whole& whole, const comm::MeshShape& shape, Fault fault = Fault::kNone) {
  sim::WorldOptions options;
  options.track_memory = true;
  options.delivery_checks = false;  // copies of buffers in flight are not a rank's
  sim::World world(shape.world(), options);
  Used used;
  world.run([&](sim::RankContext& rank) {
    const comm::Mesh mesh(rank, shape);
    const comm::FsdpMesh fsdp(rank, shape.world());
    const models::MeshContext parallel(mesh, {});
    const auto now = [&] {
      fsdp.world().barrier();  // what others still read of this rank's is freed then
      return world.memory(rank.rank()).current;
    };
    FullySharded sharded(models::block_names(*whole.model), whole.parameters, fsdp,
                         Policy::uniform(at::kFloat));
    const auto optimizer = make_adamw({});
    const int64_t parameters = now();
    sharded.gather_root();
    const int64_t before = now();
    world.restart_peak(rank.rank());
    std::vector<Tensor> held;
    models::ForwardOptions forward{.units = &sharded};
    forward.probe = [&](const std::string& name, const Tensor&) {
      if (fault != Fault::kWholeTokens || name != "block.0.hidden_states") return;
      held.push_back(at::empty({1, kGrid * kGrid, kWidth}, at::kFloat));
    };
    Tensor output = whole.model->forward(sharded.parameters(), whole.inputs, parallel, forward);
    const int64_t kept = now() - before;
    const int64_t peak = world.memory(rank.rank()).peak - before;
    sharded.backward(output.square().mean(), fault != Fault::kWholeGradients);
    output = Tensor();
    held.clear();
    const int64_t with_gradients = now();
    optimizer->step(sharded.trained(), 0.1);
    const int64_t with_state = now();
    if (rank.rank() != 0) return;
    used = {kept, peak, parameters, with_gradients - parameters, with_state - with_gradients};
  });
  return used;
}

// What every SP rank keeps for itself: the gathered output and what comes of the timestep, of which
// a block keeps a few forms (the sinusoid's layers, shift, 1 + scale, gate of two streams).
constexpr int64_t kOutputBytes = kFloat * kGrid * kGrid * 8;
constexpr int64_t kModulationBytes = kFloat * kLayers * 2 * 6 * kWidth;
constexpr int64_t kOwnBytes = kOutputBytes + 8 * kModulationBytes;

// Whether `ranks` ranks share what one needs but for `own` bytes.
bool is_shared(int64_t part, int64_t whole, int64_t ranks, int64_t own) {
  return part * ranks >= whole && part <= whole / ranks + own;
}

TEST_CASE("activations follow the tokens of a rank", "[fsdp][memory]") {
  const Whole whole;
  const Used one = measure(whole, {1, 1, 1});
  // Else the bound would say little: what is a rank's own must be small beside its share.
  CHECK(kOwnBytes * 50 < one.kept);
  const int64_t block = whole.bytes() / kLayers;  // rather more: the root is in it
  for (const comm::MeshShape shape :
       {comm::MeshShape{1, 1, 2}, {1, 1, 4}, {1, 2, 1}, {1, 4, 1}, {1, 2, 2}, {2, 1, 2}}) {
    const Used used = measure(whole, shape);
    INFO(shape.to_string() << ": kept " << used.kept << " of " << one.kept << ", peak " << used.peak
                           << " of " << one.peak);
    CHECK(is_shared(used.kept, one.kept, shape.sp(), kOwnBytes));
    // At the peak a block is there, too, and the next.
    CHECK(is_shared(used.peak, one.peak, shape.sp(), kOwnBytes + 2 * block));
  }
}

TEST_CASE("activations: one block's image tokens held whole are seen", "[fsdp][memory]") {
  const Whole whole;
  const Used one = measure(whole, {1, 1, 1});
  const Used used = measure(whole, {1, 1, 4}, Fault::kWholeTokens);
  CHECK(!is_shared(used.kept, one.kept, 4, kOwnBytes));
}

TEST_CASE("parameters, gradients and optimizer state are 1/(dp*sp) on each rank",
          "[fsdp][memory]") {
  const Whole whole;
  for (const comm::MeshShape shape :
       {comm::MeshShape{1, 1, 1}, {1, 1, 2}, {2, 1, 2}, {1, 2, 2}, {4, 1, 1}}) {
    INFO(shape.to_string());
    for (const auto& spec : whole.parameters.specs()) {
      REQUIRE(spec.shape[0] % shape.world() == 0);  // so that there are no pads
    }
    const Used used = measure(whole, shape);
    CHECK(used.parameters * shape.world() == whole.bytes());
    CHECK(used.gradients * shape.world() == whole.bytes());
    CHECK(used.state * shape.world() == 2 * whole.bytes());  // AdamW's two moments
  }
}

TEST_CASE("shards: a gradient that stays whole is seen", "[fsdp][memory]") {
  const Whole whole;
  const Used used = measure(whole, {2, 1, 2}, Fault::kWholeGradients);
  CHECK(used.gradients * 4 > 3 * whole.bytes());
  CHECK(used.parameters * 4 == whole.bytes());
}

}  // namespace
}  // namespace shardproof::fsdp
