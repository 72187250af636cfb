#include "verify/training/matched_training.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>

#include "fsdp/gradient_norm.h"
#include "fsdp/moving_average.h"
#include "models/text_padding.h"
#include "verify/matched/matched_context.h"
#include "verify/models/model_run.h"
#include "verify/training/training_run.h"

namespace shardproof::verify {
namespace {

using at::Tensor;
using plan::GradientConvention;

using Gradients = std::map<std::string, Tensor>;  // by parameter; undefined where there is none

Tensor sum_in_order(const std::vector<Tensor>& parts) {
  Tensor total = parts[0];
  for (size_t i = 1; i < parts.size(); ++i) total = total + parts[i];
  return total;
}

// What one chunk's loss leaves of a micro-batch.
struct ChunkResult {
  double loss = 0;
  std::vector<Gradients> blocks;  // by pass of the forward: each pass is exchanged for itself
  Gradients root;                 // of all passes together
};

class MatchedTraining {
 public:
  MatchedTraining(const TrainingCase& c, const TrainingData& data, double max_norm,
                  at::Device device)
      : c_(c),
        data_(data),
        max_norm_(max_norm),
        device_(device),
        policy_(c.policy()),
        lockstep_(c.model.mesh.sp(), device),
        optimizer_(make_training_optimizer(c)),
        average_(TrainingConstants::kEmaDecay),
        kept_(static_cast<size_t>(c.model.mesh.world())) {
    const ModelData as_model{data.model, data.parameters, data.batches[0][0].passes, {}};
    layout_ = attention_of(c.model, as_model);
    // In the order in which squares are added up: block by block, then what is in none.
    for (const std::string& block : models::block_names(*data.model)) {
      add_trained(in_blocks_,
                  [&](const std::string& name) { return name.starts_with(block + "."); });
    }
    add_trained(in_root_, [&](const std::string& name) {
      return std::find(in_blocks_.begin(), in_blocks_.end(), name) == in_blocks_.end();
    });
  }

  TrainingTensors run() {
    for (int step = 0; step < c_.steps; ++step) take_step(step);
    return std::move(results_);
  }

 private:
  void add_trained(std::vector<std::string>& names,
                   const std::function<bool(const std::string&)>& belongs) {
    for (const models::ParameterSpec& spec : data_.parameters.specs()) {
      if (spec.buffer || spec.frozen || !belongs(spec.name)) continue;
      fsdp::TrainedTensor tensor;
      tensor.name = spec.name;
      tensor.value = data_.parameters[spec.name]
                         .to(policy_.offload ? at::Device(at::kCPU) : device_, policy_.master_dtype)
                         .clone();
      // Of one shard each rank holds all.
      tensor.replicated = c_.shards == 1 || (policy_.replicated && policy_.replicated(spec.name));
      first_[spec.name] = tensor.value.clone();
      trained_.push_back(tensor);
      names.push_back(spec.name);
    }
  }

  int sp() const { return c_.model.mesh.sp(); }
  int dp() const { return c_.model.mesh.dp; }
  int world() const { return c_.model.mesh.world(); }

  // The parameters of each pass of a forward: those of blocks have a gradient of their own in each.
  std::vector<models::ParameterSet> leaves(size_t passes) const {
    models::ParameterSet whole = data_.parameters;
    for (const auto& tensor : trained_) whole.set(tensor.name, tensor.value);
    std::vector<models::ParameterSet> sets = {whole.leaves(policy_.param_dtype, device_)};
    while (sets.size() < passes) {
      models::ParameterSet& next = sets.emplace_back(sets[0]);
      for (const std::string& name : in_blocks_) {
        next.set(name, sets[0][name].detach().clone().requires_grad_(true));
      }
    }
    return sets;
  }

  Tensor own_samples(const Tensor& x, int dp) const {
    return x.narrow(0, dp * c_.model.batch, c_.model.batch).to(device_);
  }

  Tensor loss_of(const Tensor& output, const MicroBatch& batch, int step, int dp, int chunk) const {
    const at::ScalarType wide = policy_.reduce_dtype;
    const Tensor error = (output.to(wide) - own_samples(batch.target, dp).to(wide)).square();
    switch (c_.loss) {
      case TrainingLoss::kMaskedMean:
        return error.masked_fill(own_samples(batch.mask, dp).logical_not(), 0).sum() *
               (c_.accumulation * this->dp() /
                count_valid_elements(data_.batches[static_cast<size_t>(step)]));
      case TrainingLoss::kPerRank:
        return loss_of_own_elements(c_, error, chunk);
      default:
        return error.mean();
    }
  }

  // One chunk of one replica, on a thread of the lockstep.
  ChunkResult differentiate(const MicroBatch& batch, int step, int dp, int chunk) {
    const MatchedContext parallel(lockstep_, chunk, layout_, c_.model.parallel);
    const auto passes = micro_batch_passes(c_, data_, batch, dp, policy_.param_dtype, device_);
    const std::vector<models::ParameterSet> parameters = leaves(passes.size());
    StoppingUnits units(c_, data_, step, dp, nullptr);
    models::ForwardOptions options;
    options.policy = c_.model.policy();
    options.recompute = c_.model.recompute;
    options.units = &units;
    size_t pass_number = 0;
    const Tensor output = weighted_sum(passes, [&](const ModelPass& pass) {
      options.dropout = pass.dropout;
      return data_.model->forward(
          parameters[pass_number++],
          c_.model.text_aligned ? models::pad_text(pass.inputs, sp()) : pass.inputs, parallel,
          options);
    });
    const Tensor loss = loss_of(output, batch, step, dp, chunk);
    const bool scaled = c_.model.parallel.convention == GradientConvention::kSliceThenScaleLoss;
    const double factor = (scaled ? sp() : 1.0) / c_.accumulation;
    if (loss.requires_grad()) torch::autograd::backward({loss * factor}, {});
    ChunkResult result;
    result.loss = (loss.detach().to(at::kDouble) / c_.accumulation).item<double>();
    for (const std::string& name : in_root_) result.root[name] = parameters[0][name].grad();
    for (const models::ParameterSet& set : parameters) {
      Gradients& grads = result.blocks.emplace_back();
      for (const std::string& name : in_blocks_) grads[name] = set[name].grad();
    }
    return result;
  }

  // Adds the ranks' gradients of these parameters to what they have kept; if they are exchanged
  // now, their mean over all ranks to the step's.
  void exchange(const std::vector<const Gradients*>& ranks, const std::vector<std::string>& names,
                bool now) {
    for (const std::string& name : names) {
      std::vector<Tensor> shares;
      for (size_t r = 0; r < ranks.size(); ++r) {
        Tensor& kept = kept_[r][name];
        if (const Tensor& grad = ranks[r]->at(name); grad.defined()) {
          const Tensor wide = grad.to(policy_.reduce_dtype);
          kept = kept.defined() ? kept + wide : wide;
        }
        if (!now) continue;
        const Tensor share = std::exchange(kept, Tensor());
        shares.push_back(share.defined()
                             ? share
                             : at::zeros(data_.parameters.spec(name).shape,
                                         at::TensorOptions(device_).dtype(policy_.reduce_dtype)));
      }
      if (now) add_mean(tensor_of(name), shares);
    }
  }

  // Sharded parameters: over the ranks of each copy, then over the copies. Replicated ones: over
  // all ranks.
  void add_mean(fsdp::TrainedTensor& tensor, const std::vector<Tensor>& shares) const {
    const auto group = static_cast<std::ptrdiff_t>(tensor.replicated ? world() : c_.shards);
    std::vector<Tensor> copies;
    for (auto at = shares.begin(); at != shares.end(); at += group) {
      copies.push_back(sum_in_order({at, at + group}));
    }
    const Tensor mean = sum_in_order(copies).div(world()).to(tensor.value.options());
    tensor.grad = tensor.grad.defined() ? tensor.grad + mean : mean;
  }

  fsdp::TrainedTensor& tensor_of(const std::string& name) {
    return *std::find_if(trained_.begin(), trained_.end(),
                         [&](const fsdp::TrainedTensor& t) { return t.name == name; });
  }

  // Squares are added up by shard, then over the shards.
  double gradient_norm() const {
    double total = 0;
    for (int shard = 0; shard < c_.shards; ++shard) {
      std::vector<Tensor> sharded, replicated;
      for (const fsdp::TrainedTensor& tensor : trained_) {
        (tensor.replicated ? replicated : sharded)
            .push_back(at::linalg_vector_norm(
                tensor.replicated ? tensor.grad : rows_of(tensor.grad, shard), 2, {}, false,
                at::kDouble));
      }
      const auto squares = [](const std::vector<Tensor>& norms) {
        return norms.empty() ? 0.0 : at::stack(norms).square().sum(0).item<double>();
      };
      total += squares(sharded) + squares(replicated) / c_.shards;
    }
    return std::sqrt(total);
  }

  Tensor rows_of(const Tensor& x, int shard) const {
    const Tensor rows = x.dim() == 0 ? x.view({1}) : x;
    const int64_t all = rows.size(0), each = (all + c_.shards - 1) / c_.shards;
    const int64_t begin = std::min<int64_t>(shard * each, all);
    return rows.narrow(0, begin, std::min(each, all - begin)).clone();
  }

  void take_step(int step) {
    for (fsdp::TrainedTensor& tensor : trained_) tensor.grad = Tensor();
    std::vector<double> losses(static_cast<size_t>(world()), 0);
    for (int micro = 0; micro < c_.accumulation; ++micro) {
      const MicroBatch& batch =
          data_.batches[static_cast<size_t>(step)][static_cast<size_t>(micro)];
      std::vector<ChunkResult> ranks(static_cast<size_t>(world()));
      for (int dp = 0; dp < this->dp(); ++dp) {
        lockstep_.run([&](int chunk) {
          ranks[static_cast<size_t>(dp * sp() + chunk)] = differentiate(batch, step, dp, chunk);
        });
      }
      for (size_t r = 0; r < ranks.size(); ++r) losses[r] += ranks[r].loss;
      exchange_all(ranks, micro + 1 == c_.accumulation || !c_.deferred);
    }
    double loss = 0;
    for (double share : losses) loss += share;
    finish_step(step, loss / world());
  }

  // The last pass of the forward is the first of the backward; what is not in a block comes last.
  void exchange_all(const std::vector<ChunkResult>& ranks, bool now) {
    const at::NoGradGuard no_grad;
    for (size_t pass = ranks[0].blocks.size(); pass-- > 0;) {
      std::vector<const Gradients*> grads;
      for (const ChunkResult& rank : ranks) grads.push_back(&rank.blocks[pass]);
      exchange(grads, in_blocks_, now);
    }
    std::vector<const Gradients*> grads;
    for (const ChunkResult& rank : ranks) grads.push_back(&rank.root);
    exchange(grads, in_root_, now);
  }

  void finish_step(int step, double loss) {
    const at::NoGradGuard no_grad;
    for (const auto& tensor : trained_) keep(step, tensor.name + ":grad", tensor.grad);
    const double norm = gradient_norm();
    keep(step, "loss", at::full({1}, loss, at::kDouble));
    keep(step, "grad_norm", at::full({1}, norm, at::kDouble));
    if (norm > max_norm_) fsdp::clip_gradients(trained_, norm, max_norm_);
    optimizer_->step(trained_, TrainingConstants::kLearningRate);
    average_.update(trained_);
    for (const auto& tensor : trained_) {
      keep(step, tensor.name + ":update", tensor.value - first_.at(tensor.name));
    }
    for (const auto& [role, tensors] : optimizer_->state()) {
      for (const auto& [name, x] : tensors) keep(step, name + ":" + role, x);
    }
    for (const auto& [name, x] : average_.averages()) keep(step, name + ":ema", x);
  }

  void keep(int step, const std::string& name, const Tensor& x) {
    results_[fmt::format("step{}/{}", step, name)] = x.detach().cpu().clone();
  }

  const TrainingCase& c_;
  const TrainingData& data_;
  double max_norm_;
  at::Device device_;
  fsdp::Policy policy_;
  Lockstep lockstep_;
  AttentionCase layout_;
  std::unique_ptr<fsdp::Optimizer> optimizer_;
  fsdp::MovingAverage average_;
  std::vector<fsdp::TrainedTensor> trained_;  // whole, in the model's order
  std::vector<std::string> in_blocks_, in_root_;
  std::map<std::string, Tensor> first_;
  std::vector<Gradients> kept_;  // by rank: not exchanged yet, in the reduce dtype
  TrainingTensors results_;
};

}  // namespace

TrainingTensors run_matched_training(const TrainingCase& c, const TrainingData& data,
                                     double max_norm, at::Device device) {
  return MatchedTraining(c, data, max_norm, device).run();
}

}  // namespace shardproof::verify
