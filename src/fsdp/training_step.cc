#include "fsdp/training_step.h"

#include <ATen/ATen.h>

#include <cmath>

#include "comm/tag.h"

namespace shardproof::fsdp {
namespace {

double loss_factor(const StepOptions& options, const comm::Mesh& mesh) {
  const bool scaled = options.convention == plan::GradientConvention::kSliceThenScaleLoss;
  return (scaled ? mesh.shape().sp() : 1.0) / options.micro_batches;
}

double mean_over_ranks(const at::Tensor& sum, const comm::Communicator& world) {
  const comm::CollectiveScope scope("loss.report");
  const at::Tensor total = world.all_reduce(sum.to(at::kDouble).view({1})).wait();
  return total.item<double>() / world.size();
}

}  // namespace

StepReport training_step(FullySharded& sharded, Optimizer& optimizer, MovingAverage* average,
                         const comm::Mesh& mesh, const comm::FsdpMesh& fsdp,
                         const StepOptions& options, const MicroLoss& loss) {
  sharded.zero_grad();
  at::Tensor reported;
  for (int i = 0; i < options.micro_batches; ++i) {
    sharded.gather_root();
    const at::Tensor mine = loss(i);
    const at::Tensor share = mine.detach().to(at::kDouble) / options.micro_batches;
    reported = reported.defined() ? reported + share : share;
    const bool last = i + 1 == options.micro_batches;
    sharded.backward(mine * loss_factor(options, mesh), last || !options.deferred_sync);
  }
  StepReport report;
  report.loss = mean_over_ranks(reported, fsdp.world());
  const auto trained = sharded.trained();
  if (options.probe) options.probe(trained);
  report.grad_norm = options.norm(trained, fsdp);
  report.skipped = !std::isfinite(report.grad_norm);
  if (report.skipped) return report;
  if (report.grad_norm > options.max_norm) {
    clip_gradients(trained, report.grad_norm, options.max_norm);
  }
  optimizer.step(trained, options.learning_rate);
  if (average) average->update(trained);
  return report;
}

}  // namespace shardproof::fsdp
