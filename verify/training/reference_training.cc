#include "verify/training/reference_training.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>

#include "verify/models/model_run.h"

namespace shardproof::verify {
namespace {

using at::Tensor;
using K = TrainingConstants;

class ReferenceTraining {
 public:
  ReferenceTraining(const TrainingCase& c, const TrainingData& data, bool exact, double max_norm,
                    at::Device device)
      : c_(c),
        data_(data),
        max_norm_(max_norm),
        device_(device),
        single_(device),
        mesh_(single_, {}),
        parallel_(mesh_, plain_options(c)),
        policy_(exact ? fsdp::Policy::uniform(at::kDouble) : c.policy()),
        casts_(exact ? models::DtypePolicy::kReference : c.model.policy()) {
    for (const models::ParameterSpec& spec : data.parameters.specs()) {
      if (spec.buffer || spec.frozen) continue;
      first_[spec.name] = values_[spec.name] =
          data.parameters[spec.name].to(device, policy_.master_dtype);
      names_.push_back(spec.name);
    }
  }

  TrainingTensors run() {
    for (int step = 0; step < c_.steps; ++step) take_step(step);
    for (auto& [name, x] : results_) x = x.cpu();
    return std::move(results_);
  }

 private:
  static models::ParallelOptions plain_options(const TrainingCase& c) {
    models::ParallelOptions options;
    options.backend = c.model.parallel.backend;
    return options;
  }

  models::ParameterSet leaves() const {
    models::ParameterSet parameters = data_.parameters;
    for (const std::string& name : names_) parameters.set(name, values_.at(name));
    return parameters.leaves(policy_.param_dtype, device_);
  }

  const std::vector<MicroBatch>& batches(int step) const {
    return data_.batches[static_cast<size_t>(step)];
  }

  // One replica's share of the step's loss.
  Tensor loss_of(const Tensor& output, const MicroBatch& batch, int dp, int step) const {
    const auto samples = [&](const Tensor& x) {
      return x.narrow(0, dp * c_.model.batch, c_.model.batch).to(device_);
    };
    const at::ScalarType wide = policy_.reduce_dtype;
    const Tensor error = (output.to(wide) - samples(batch.target).to(wide)).square();
    if (c_.loss == TrainingLoss::kMaskedMean) {
      return (error * samples(batch.mask)).sum() / count_valid_elements(batches(step));
    }
    return error.mean() / (c_.accumulation * c_.model.mesh.dp);
  }

  void differentiate(const MicroBatch& batch, int step, int dp) {
    const models::ParameterSet parameters = leaves();
    StoppingUnits units(c_, data_, step, dp, nullptr);
    models::ForwardOptions options;
    options.policy = casts_;
    options.units = &units;
    const Tensor output =
        weighted_sum(micro_batch_passes(c_, data_, batch, dp, policy_.param_dtype, device_),
                     [&](const ModelPass& pass) {
                       options.dropout = pass.dropout;
                       return data_.model->forward(parameters, pass.inputs, parallel_, options);
                     });
    const Tensor loss = loss_of(output, batch, dp, step);
    loss_ += loss.item<double>();
    if (loss.requires_grad()) torch::autograd::backward({loss}, {});
    for (const std::string& name : names_) {
      const Tensor& grad = parameters[name].grad();
      if (grad.defined()) grads_[name] = grads_[name] + grad.to(policy_.reduce_dtype);
    }
  }

  void take_step(int step) {
    loss_ = 0;
    for (const std::string& name : names_) {
      grads_[name] =
          at::zeros_like(values_[name], values_[name].options().dtype(policy_.reduce_dtype));
    }
    for (const MicroBatch& batch : batches(step)) {
      for (int dp = 0; dp < c_.model.mesh.dp; ++dp) differentiate(batch, step, dp);
    }
    const at::NoGradGuard no_grad;
    double squares = 0;
    for (const std::string& name : names_) {
      squares += grads_[name].to(at::kDouble).square().sum().item<double>();
      keep(step, name + ":grad", grads_[name]);
    }
    const double norm = std::sqrt(squares);
    keep(step, "loss", at::full({1}, loss_, at::kDouble));
    keep(step, "grad_norm", at::full({1}, norm, at::kDouble));
    const double clip = std::min(1.0, max_norm_ / (norm + 1e-6));
    for (const std::string& name : names_) {
      const Tensor grad = grads_[name].to(policy_.master_dtype) * clip;
      c_.sgd ? sgd(name, grad) : adamw(name, grad, step + 1);
      Tensor& average = state_[name + ":ema"];
      average = average.defined() ? average * K::kEmaDecay + values_[name] * (1 - K::kEmaDecay)
                                  : values_[name];
      keep(step, name + ":update", values_[name] - first_[name]);
    }
    for (const auto& [name, x] : state_) keep(step, name, x);
  }

  // torch.optim.SGD: L2 decay joins the gradient, which joins the momentum.
  void sgd(const std::string& name, Tensor grad) {
    grad = grad + values_[name] * K::kSgdDecay;
    Tensor& momentum = state_[name + ":momentum_buffer"];
    momentum = momentum.defined() ? momentum * K::kMomentum + grad : grad;
    values_[name] = values_[name] - momentum * K::kLearningRate;
  }

  // Loshchilov and Hutter, arXiv:1711.05101, algorithm 2.
  void adamw(const std::string& name, const Tensor& grad, int step) {
    Tensor& m = state_[name + ":exp_avg"];
    Tensor& v = state_[name + ":exp_avg_sq"];
    if (!m.defined()) m = at::zeros_like(grad), v = at::zeros_like(grad);
    m = m * K::kBeta1 + grad * (1 - K::kBeta1);
    v = v * K::kBeta2 + grad.square() * (1 - K::kBeta2);
    const Tensor m_hat = m / (1 - std::pow(K::kBeta1, step));
    const Tensor v_hat = v / (1 - std::pow(K::kBeta2, step));
    values_[name] = values_[name] * (1 - K::kLearningRate * K::kAdamDecay) -
                    m_hat / (v_hat.sqrt() + c_.epsilon()) * K::kLearningRate;
  }

  void keep(int step, const std::string& name, const Tensor& x) {
    results_[fmt::format("step{}/{}", step, name)] = x;
  }

  const TrainingCase& c_;
  const TrainingData& data_;
  double max_norm_;
  at::Device device_;
  models::SingleRank single_;
  comm::Mesh mesh_;
  models::MeshContext parallel_;
  fsdp::Policy policy_;
  models::DtypePolicy casts_;
  std::vector<std::string> names_;  // trained, in the model's order
  std::map<std::string, Tensor> first_, values_, grads_, state_;
  double loss_ = 0;
  TrainingTensors results_;
};

}  // namespace

TrainingTensors run_reference_training(const TrainingCase& c, const TrainingData& data, bool exact,
                                       double max_norm, at::Device device) {
  return ReferenceTraining(c, data, exact, max_norm, device).run();
}

}  // namespace shardproof::verify
