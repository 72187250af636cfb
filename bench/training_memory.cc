// How much memory does a rank need for a training step, and does the simulator know it?
//
//   bench_training_memory --ranks 2 --device cuda                       # virtual ranks
//   shardproof launch -n 2 -- bench_training_memory --transport nccl    # real ones
//
// One replica of a QwenImage transformer of full width, sharded over all ranks (FSDP) with Ulysses
// inside: bf16 parameters, fp32 sums, master copies and AdamW. Prints one line of JSON a rank:
// bytes as they were requested from the allocator, what the shards must take by arithmetic, and the
// peak over the second step.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <fmt/ranges.h>

#include <cstdio>
#include <mutex>

#include "base/error.h"
#include "base/run_main.h"
#include "bench/command_line.h"
#include "bench/real_ranks.h"
#include "comm/device.h"
#include "fsdp/training_step.h"
#include "sim/world.h"

namespace {

using namespace shardproof;
using at::Tensor;

struct Options {
  std::string transport = "sim";
  std::string device;
  int ranks = 2;
  int64_t layers = 2, heads = 24, text = 256, grid = 32;
  bool recompute = false;
};

std::unique_ptr<models::Transformer> make_model(const Options& o) {
  const std::string config = fmt::format(
      R"({{"_class_name":"QwenImageTransformer2DModel","num_layers":{},
          "num_attention_heads":{}}})",
      o.layers, o.heads);
  return models::make_transformer(parse_json(config, "the benchmark's configuration"));
}

// The same numbers on every rank.
models::ParameterSet make_parameters(const models::Transformer& model, at::Device device) {
  models::ParameterSet parameters(model.parameter_specs());
  parameters.allocate(at::TensorOptions(at::kBFloat16).device(device));
  for (const auto& spec : parameters.specs()) {
    const bool norm = spec.shape.size() == 1 && spec.name.ends_with(".weight");
    parameters[spec.name].fill_(norm ? 1.0 : 0.001);
  }
  return parameters;
}

models::TransformerInputs make_inputs(const Options& o, at::Device device) {
  at::Generator random = at::make_generator<at::CPUGeneratorImpl>(3);
  const auto normal = [&](at::IntArrayRef shape) {
    return at::randn(shape, random, at::TensorOptions(at::kFloat)).to(device, at::kBFloat16);
  };
  models::TransformerInputs in;
  in.hidden_states = normal({1, o.grid * o.grid, 64});
  in.encoder_hidden_states = normal({1, o.text, 3584});
  in.timestep = at::full({1}, 0.5, at::TensorOptions(at::kBFloat16).device(device));
  in.img_shapes = {{{1, o.grid, o.grid}}};
  return in;
}

struct Measured {
  int64_t steady = 0;  // between steps
  int64_t peak = 0;
};

// Bytes of this rank's shards: master copies, gradients and two moments in fp32, and buffers.
int64_t shard_bytes(fsdp::FullySharded& sharded) {
  int64_t bytes = 0;
  for (const fsdp::ShardedParameter* parameter : sharded.all()) {
    const int64_t row = c10::multiply_integers(parameter->shape()) / parameter->layout().rows;
    const auto& layout = parameter->layout();
    bytes += 4 * row * (layout.chunk() + 3 * layout.shard(parameter->index()).size());
  }
  return bytes;
}

// `use`: the rank's memory now.
std::string run_rank(const Options& o, comm::BackendFactory& rank,
                     const std::function<sim::MemoryUse()>& use,
                     const std::function<void()>& restart_peak) {
  const auto model = make_model(o);
  const comm::Mesh mesh(rank, {1, 1, rank.world_size()});
  const comm::FsdpMesh fsdp_mesh(rank, rank.world_size());
  models::ParallelOptions split;
  const models::MeshContext parallel(mesh, split);
  auto whole = std::make_unique<models::ParameterSet>(make_parameters(*model, rank.device()));
  fsdp::FullySharded sharded(models::block_names(*model), *whole, fsdp_mesh, fsdp::Policy::mixed());
  whole.reset();
  const auto optimizer = fsdp::make_adamw({});
  const models::TransformerInputs inputs = make_inputs(o, rank.device());
  models::ForwardOptions options;
  options.policy = models::DtypePolicy::kFaithful;
  options.recompute = o.recompute;
  options.units = &sharded;
  const auto step = [&] {
    fsdp::training_step(sharded, *optimizer, nullptr, mesh, fsdp_mesh, {}, [&](int) {
      return model->forward(sharded.parameters(), inputs, parallel, options)
          .to(at::kFloat)
          .square()
          .mean();
    });
  };
  step();  // library handles and workspaces come with the first
  const int64_t steady = use().current;
  restart_peak();
  step();
  return fmt::format(
      "{{\"transport\": \"{}\", \"rank\": {}, \"ranks\": {}, \"layers\": {}, \"tokens\": {}, "
      "\"recompute\": {}, \"shards_by_arithmetic\": {}, \"between_steps\": {}, \"peak\": {}}}",
      o.transport, rank.rank(), rank.world_size(), o.layers, o.text + o.grid * o.grid, o.recompute,
      shard_bytes(sharded), steady, use().peak);
}

void run_simulated(const Options& o, at::Device device) {
  sim::WorldOptions options;
  options.device = device;
  options.track_memory = true;
  options.delivery_checks = false;  // copies of buffers in flight are the simulator's, not a rank's
  sim::World world(o.ranks, options);
  std::mutex printing;
  world.run([&](sim::RankContext& rank) {
    const std::string line = run_rank(
        o, rank, [&] { return world.memory(rank.rank()); },
        [&] { world.restart_peak(rank.rank()); });
    const std::lock_guard lock(printing);
    fmt::print("{}\n", line);
  });
}

void run_real(const Options& o) {
  const auto world = bench::join_world(comm::rendezvous_from_environment(), o.transport,
                                       fmt::format("{} layers", o.layers));
  sim::MemoryLedger ledger(1);
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, ledger.reporter(0));
  fmt::print("{}\n",
             run_rank(
                 o, *world, [&] { return ledger.use(0); }, [&] { ledger.restart_peak(0); }));
  std::fflush(stdout);
  world->barrier();
}

int run(int argc, char** argv) {
  Options o;
  CLI::App app{"Measures the memory that a rank of a sharded training step requests."};
  app.add_option("--transport", o.transport)->check(CLI::IsMember({"sim", "nccl", "gloo"}));
  app.add_option("--device", o.device, "of virtual ranks (default: cpu)")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--ranks", o.ranks, "virtual ranks")->check(CLI::Range(1, 64));
  app.add_option("--layers", o.layers)->check(CLI::Range(1, 60));
  app.add_option("--heads", o.heads)->check(CLI::Range(1, 64));
  app.add_option("--text", o.text, "text tokens")->check(CLI::PositiveNumber);
  app.add_option("--grid", o.grid, "rows and columns of image tokens")->check(CLI::PositiveNumber);
  app.add_flag("--recompute", o.recompute, "activation checkpointing");
  if (!bench::parse_command_line(app, argc, argv)) return 0;
  if (o.transport == "sim") {
    run_simulated(o, comm::compute_device(o.device.empty() ? "cpu" : o.device));
  } else {
    run_real(o);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  shardproof::run_main("bench_training_memory", [=] { return run(argc, argv); });
}
