// A run that stops and goes on is the run that did not stop.
#include "fsdp/training_state.h"

#include "tests/catch.h"

#include <ATen/ATen.h>

#include <array>
#include <atomic>
#include <memory>

#include "base/error.h"
#include "fsdp/training_step.h"
#include "sim/world.h"
#include "tests/file_support.h"
#include "tests/fsdp/shard_support.h"

namespace shardproof::fsdp {
namespace {

using at::Tensor;
using tests::contains;
namespace fs = std::filesystem;

const std::vector<std::string> kBlocks = {"blocks.0", "blocks.1"};

models::ParameterSet whole_parameters() {
  models::ParameterSet whole(
      {{"blocks.0.weight", {10, 10}}, {"blocks.1.weight", {10, 10}}, {"bias", {10}}});
  for (const auto& spec : whole.specs()) {
    const int64_t n = c10::multiply_integers(spec.shape);
    whole.set(spec.name, (at::arange(n, at::kDouble) + n).sin().view(spec.shape) / 2);
  }
  return whole;
}

// One rank of a run in fp32 whose inputs and dropout masks are drawn as it goes.
struct Run {
  Run(sim::RankContext& context, comm::MeshShape shape, bool sgd)
      : mesh(context, shape),
        fsdp(context, shape.world()),
        sharded(kBlocks, whole_parameters(), fsdp, Policy::uniform(at::kFloat)),
        optimizer(sgd ? make_sgd({0.9, 0.01, false}) : make_adamw({})),
        random(11, shape, context.rank(), context.device()) {}

  void steps(int count) {
    StepOptions options;
    options.learning_rate = 0.1;
    for (int i = 0; i < count; ++i) {
      training_step(sharded, *optimizer, &average, mesh, fsdp, options,
                    [&](int) { return loss(); });
    }
  }

  Tensor loss() {
    at::Generator& generator = random.replica();
    at::Generator& own = random.rank();
    const auto options = at::TensorOptions(at::kFloat).device(fsdp.device());
    Tensor x = at::randn({4, 10}, generator, options) + 0.01 * at::randn({4, 10}, own, options);
    for (const std::string& name : kBlocks) {
      const models::Block block = [&](const std::vector<Tensor>& in) {
        return std::vector<Tensor>{
            at::tanh(at::matmul(in[0], sharded.parameters()[name + ".weight"]))};
      };
      x = sharded.run(name, block, {x})[0];
      x = x * at::rand({4, 10}, generator, options).ge(0.2);
    }
    return (x + sharded.parameters()["bias"]).square().mean();
  }

  TrainingState state() { return {sharded, *optimizer, &average, &random}; }

  comm::Mesh mesh;
  comm::FsdpMesh fsdp;
  FullySharded sharded;
  std::unique_ptr<Optimizer> optimizer;
  MovingAverage average{0.9};
  comm::RandomStreams random;
};

CheckpointInfo info_of(const comm::MeshShape& shape) {
  CheckpointInfo info;
  info.model = "toy";
  info.mesh = shape.to_string();
  info.seed = 11;
  info.step = 2;
  return info;
}

using Values = std::map<std::string, Tensor>;

Values values_of(Run& run) {
  Values values;
  const models::ParameterSet whole = run.sharded.gather_all();
  for (const auto& spec : whole.specs()) values[spec.name] = whole[spec.name];
  return values;
}

// Runs `program` on the ranks of `shape`; what rank 0 returned.
Values on_ranks(comm::MeshShape shape, bool sgd, const std::function<void(Run&)>& program) {
  sim::World world(shape.world(), tests::on_device());
  Values result;
  world.run([&](sim::RankContext& context) {
    Run run(context, shape, sgd);
    program(run);
    const Values values = values_of(run);
    if (context.rank() == 0) result = values;
  });
  return result;
}

bool equal(const Values& a, const Values& b) {
  for (const auto& [name, x] : a) {
    if (!at::equal(x, b.at(name))) return false;
  }
  return true;
}

TEST_CASE("training state: a resumed run is the uninterrupted one, to the bit", "[fsdp]") {
  for (const bool sgd : {false, true}) {
    for (const comm::MeshShape shape : {comm::MeshShape{3, 1, 1}, {2, 1, 2}}) {
      const tests::TempFolder folder;
      const fs::path saved = folder.path() / "step-2";
      const Values uninterrupted = on_ranks(shape, sgd, [](Run& run) { run.steps(4); });
      on_ranks(shape, sgd, [&](Run& run) {
        run.steps(2);
        save_training(saved, info_of(shape), run.state(), run.fsdp);
      });
      std::atomic<bool> checked = true;  // assertions are not for two threads at once
      const Values resumed = on_ranks(shape, sgd, [&](Run& run) {
        const CheckpointInfo info = resume_training(saved, info_of(shape), run.state(), run.fsdp);
        checked = checked && info.step == 2 && run.optimizer->steps() == 2;
        run.steps(2);
      });
      CHECK(checked);
      CHECK(equal(uninterrupted, resumed));
      CHECK(!equal(uninterrupted, on_ranks(shape, sgd, [](Run& run) { run.steps(3); })));
    }
  }
}

TEST_CASE("training state: another mesh takes the same weights and state", "[fsdp]") {
  const tests::TempFolder folder;
  const fs::path saved = folder.path() / "step-2";
  const comm::MeshShape four{4, 1, 1};
  const Values before = on_ranks(four, false, [&](Run& run) {
    run.steps(2);
    save_training(saved, info_of(four), run.state(), run.fsdp);
  });
  for (const comm::MeshShape shape : {comm::MeshShape{1, 1, 1}, {3, 1, 1}, {2, 2, 2}}) {
    const Values loaded = on_ranks(shape, false, [&](Run& run) {
      resume_training(saved, info_of(shape), run.state(), run.fsdp);
    });
    CHECK(equal(before, loaded));
  }
}

TEST_CASE("training state: before the first step, and of another optimizer", "[fsdp]") {
  const tests::TempFolder folder;
  const fs::path saved = folder.path() / "step-0";
  const comm::MeshShape two{2, 1, 1};
  on_ranks(two, false,
           [&](Run& run) { save_training(saved, info_of(two), run.state(), run.fsdp); });
  const Values resumed = on_ranks(two, false, [&](Run& run) {
    resume_training(saved, info_of(two), run.state(), run.fsdp);
    run.steps(2);
  });
  CHECK(equal(resumed, on_ranks(two, false, [](Run& run) { run.steps(2); })));
  std::array<std::string, 2> errors;
  on_ranks(two, true, [&](Run& run) {
    try {
      resume_training(saved, info_of(two), run.state(), run.fsdp);
    } catch (const Error& error) {
      errors[static_cast<size_t>(run.fsdp.world().rank())] = error.what();
    }
  });
  for (const std::string& error : errors) CHECK(contains(error, "momentum_buffer"));
}

}  // namespace
}  // namespace shardproof::fsdp
