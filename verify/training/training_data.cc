#include "verify/training/training_data.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include "comm/random_streams.h"

namespace shardproof::verify {
namespace {

using at::Tensor;

// Replica r has about (r+1)/(dp+1) of its elements.
Tensor draw_mask(const TrainingCase& c, const Tensor& target, uint64_t seed) {
  at::Generator generator = at::detail::createCPUGenerator(seed);
  const Tensor random = at::rand(target.sizes(), generator, at::kDouble);
  const Tensor replica =
      at::arange(target.size(0), at::kLong).div(c.model.batch, "floor").to(at::kDouble);
  std::vector<int64_t> per_sample(static_cast<size_t>(target.dim()), 1);
  per_sample[0] = -1;
  return random.lt(((replica + 1) / (c.model.mesh.dp + 1)).view(per_sample));
}

}  // namespace

TrainingData draw_training_data(const TrainingCase& c) {
  ModelData first = draw_model_data(c.model);
  TrainingData data{first.model, first.parameters, {}};
  for (int step = 0; step < c.steps; ++step) {
    std::vector<MicroBatch>& batches = data.batches.emplace_back();
    for (int micro = 0; micro < c.accumulation; ++micro) {
      ModelCase drawn = c.model;
      const auto number = static_cast<uint64_t>(step) * 1000 + static_cast<uint64_t>(micro);
      drawn.seed = comm::derive_seed(c.model.seed, number);
      ModelData fresh = draw_model_data(drawn);
      batches.push_back(
          {fresh.passes, fresh.cotangent, draw_mask(c, fresh.cotangent, drawn.seed + 1)});
    }
  }
  return data;
}

double count_valid_elements(const std::vector<MicroBatch>& step) {
  double count = 0;
  for (const MicroBatch& batch : step) count += batch.mask.sum().item<double>();
  return count;
}

Tensor loss_of_own_elements(const TrainingCase& c, const Tensor& error, int sp_rank) {
  const int sp = c.model.mesh.sp();
  const Tensor own = at::arange(error.numel(), at::TensorOptions(at::kLong))
                         .remainder(sp)
                         .eq(sp_rank)
                         .view(error.sizes());
  return (error * own.to(error.device())).sum() * sp / error.numel();
}

std::vector<ModelPass> micro_batch_passes(const TrainingCase& c, const TrainingData& data,
                                          const MicroBatch& batch, int dp, at::ScalarType dtype,
                                          at::Device device) {
  const ModelData as_model{data.model, data.parameters, batch.passes, batch.target};
  std::vector<ModelPass> passes = replica_passes(c.model, as_model, dp);
  for (ModelPass& pass : passes) {
    for (auto& [name, x] : pass.inputs.tensors()) {
      pass.inputs[name] = x.is_floating_point() ? x.to(device, dtype) : x.to(device);
    }
  }
  return passes;
}

StoppingUnits::StoppingUnits(const TrainingCase& c, const TrainingData& data, int step, int dp,
                             models::BlockUnits* inner)
    : inner_(inner) {
  if (c.stop && (dp % 2 == 1 || step % 2 == 1)) {
    stop_behind_ = models::block_names(*data.model).front();
  }
}

std::vector<Tensor> StoppingUnits::run(const std::string& name, const models::Block& block,
                                       const std::vector<Tensor>& inputs) {
  std::vector<Tensor> outputs = inner_ ? inner_->run(name, block, inputs) : block(inputs);
  if (name == stop_behind_) {
    for (Tensor& output : outputs) output = output.detach();
  }
  return outputs;
}

}  // namespace shardproof::verify
