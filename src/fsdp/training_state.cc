#include "fsdp/training_state.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "base/error.h"
#include "models/lora.h"

namespace shardproof::fsdp {
namespace {

using at::Tensor;

constexpr const char* kSteps = "optimizer_steps";

bool trains_adapters(const TrainingState& state) {
  const std::vector<TrainedTensor> trained = state.sharded.trained();
  return std::any_of(trained.begin(), trained.end(),
                     [](const TrainedTensor& tensor) { return models::is_adapter(tensor.name); });
}

// Tensors of this rank's part of the state, by role; new zeros where the run has none yet.
struct Parts {
  std::vector<ShardedTensor> tensors;
  Optimizer::State optimizer;
  std::map<std::string, Tensor> averages;
};

// `fresh`: tensors of their own, to be loaded into, in place of the run's.
Parts parts_of(const TrainingState& state, const comm::FsdpMesh& mesh, bool fresh) {
  Parts parts;
  for (ShardedParameter* parameter : state.sharded.all()) {
    if (!parameter->trained()) continue;
    const std::string& name = parameter->name();
    const bool writes =
        parameter->replicated() ? mesh.world().rank() == 0 : mesh.replicas().rank() == 0;
    const auto add = [&](const std::string& role, const Tensor& rows) {
      parts.tensors.push_back({name + ":" + role, parameter->shape(), parameter->layout(),
                               parameter->index(), rows, writes});
    };
    const auto own = [&](const Tensor* there) {
      if (!there) return at::zeros_like(parameter->rows());
      return fresh ? at::zeros_like(*there) : *there;
    };
    const Tensor rows = parameter->rows();
    add("param", own(&rows));
    for (const std::string& role : state.optimizer.roles()) {
      const auto tensors = state.optimizer.state().find(role);
      const bool there = tensors != state.optimizer.state().end();
      Tensor& kept = parts.optimizer[role][name];
      kept = own(there ? &tensors->second.at(name) : nullptr);
      add(role, kept);
    }
    if (!state.average) continue;
    const auto average = state.average->averages().find(name);
    Tensor& kept = parts.averages[name];
    kept = own(average == state.average->averages().end() ? &rows : &average->second);
    add("ema", kept);
  }
  return parts;
}

}  // namespace

void save_training(const std::filesystem::path& folder, CheckpointInfo info,
                   const TrainingState& state, const comm::FsdpMesh& mesh) {
  const at::NoGradGuard no_grad;
  info.numbers[kSteps] = static_cast<double>(state.optimizer.steps());
  if (trains_adapters(state)) {
    info.numbers[kAdapterScaleNumber] = state.sharded.parameters().adapter_scale();
  }
  RankState rank;
  if (state.random) {
    rank["replica"] = state.random->replica().get_state();
    rank["rank"] = state.random->rank().get_state();
  }
  const Parts parts = parts_of(state, mesh, /*fresh=*/false);
  save_checkpoint(folder, info, parts.tensors, rank, mesh.world(), mesh.device());
}

CheckpointInfo resume_training(const std::filesystem::path& folder, const CheckpointInfo& expected,
                               const TrainingState& state, const comm::FsdpMesh& mesh) {
  const at::NoGradGuard no_grad;
  Parts parts = parts_of(state, mesh, /*fresh=*/true);
  const LoadedCheckpoint loaded =
      load_checkpoint(folder, expected, parts.tensors, mesh.world(), mesh.device());
  const auto steps = loaded.info.numbers.find(kSteps);
  if (steps == loaded.info.numbers.end()) {
    bad_input("{}: the manifest does not say '{}'", folder.string(), kSteps);
  }
  std::map<std::string, Tensor> rows;
  for (const ShardedTensor& tensor : parts.tensors) rows[tensor.name] = tensor.rows;
  for (ShardedParameter* parameter : state.sharded.all()) {
    if (parameter->trained()) parameter->rows().copy_(rows.at(parameter->name() + ":param"));
  }
  state.optimizer.restore(std::move(parts.optimizer), static_cast<int64_t>(steps->second));
  if (state.average) state.average->restore(std::move(parts.averages));
  if (state.random && !loaded.rank_state.empty()) {
    state.random->replica().set_state(loaded.rank_state.at("replica"));
    state.random->rank().set_state(loaded.rank_state.at("rank"));
  }
  return loaded.info;
}

}  // namespace shardproof::fsdp
