#include "verify/mutants/bare_run.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <limits>

namespace shardproof::verify {
namespace {

using at::Tensor;

Traffic traffic(const RankWorld& world) {
  Traffic calls;
  for (int r = 0; r < world.size(); ++r) calls.push_back(world.calls(r));
  return calls;
}

BareRun run(const std::string& id, const AttentionSubject& subject, Worlds& worlds) {
  const AttentionCase c = AttentionCase::parse(id);
  RankWorld& world = worlds.get(c.mesh.world());
  const SequenceParallelRun run = run_sequence_parallel(c, draw_attention_data(c), subject, world);
  if (!run.completed) return {};
  const AttentionTensors& t = run.tensors;
  return {true,
          {{"output", t.out}, {"lse", t.lse}, {"q:grad", t.dq}, {"k:grad", t.dk}, {"v:grad", t.dv}},
          traffic(world)};
}

BareRun run(const std::string& id, const ModelSubject& subject, Worlds& worlds) {
  const ModelCase c = ModelCase::parse(id);
  RankWorld& world = worlds.get(c.mesh.world());
  ModelRun run = run_parallel_model(c, draw_model_data(c), subject, world);
  return {run.completed, std::move(run.tensors), traffic(world)};
}

BareRun run(const std::string& id, const TrainingSubject& subject, Worlds& worlds) {
  const TrainingCase c = TrainingCase::parse(id);
  RankWorld& world = worlds.get(c.model.mesh.world());
  TrainingRun run = run_parallel_training(c, draw_training_data(c), subject, world);
  return {run.completed, std::move(run.tensors), traffic(world)};
}

bool same_bytes(const Tensor& a, const Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  const Tensor x = a.contiguous(), y = b.contiguous();
  return x.nbytes() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

double distance(const Tensor& a, const Tensor& b) {
  if (a.sizes() != b.sizes()) return std::numeric_limits<double>::infinity();
  const double difference = (b.to(at::kDouble) - a.to(at::kDouble)).norm().item<double>();
  const double norm = a.to(at::kDouble).norm().item<double>();
  return difference == 0 ? 0 : difference / norm;
}

}  // namespace

BareRun run_bare(const Plant& plant, Worlds& worlds) {
  return std::visit([&](const auto& subject) { return run(plant.case_id, subject, worlds); },
                    plant.subject);
}

bool same(const BareRun& a, const BareRun& b, const std::set<std::string>& vanishing) {
  if (!a.completed || !b.completed || a.calls != b.calls) return false;
  return std::equal(a.tensors.begin(), a.tensors.end(), b.tensors.begin(), b.tensors.end(),
                    [&](const auto& x, const auto& y) {
                      return x.first == y.first &&
                             (vanishing.contains(x.first) || same_bytes(x.second, y.second));
                    });
}

Distance farthest(const BareRun& a, const BareRun& b, const std::set<std::string>& vanishing) {
  Distance most;
  for (const auto& [name, x] : a.tensors) {
    if (vanishing.contains(name)) continue;
    const auto other = b.tensors.find(name);
    const double d = other == b.tensors.end() ? std::numeric_limits<double>::infinity()
                                              : distance(x, other->second);
    if (!(d <= most.relative)) most = {name, d};
  }
  return most;
}

}  // namespace shardproof::verify
