#include "fsdp/optimizer.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

#include "base/error.h"

namespace shardproof::fsdp {
namespace {

using at::Tensor;
using States = std::vector<std::vector<Tensor>>;  // by tensor, by role

// The kernels. On CUDA, LibTorch's fused ones: one pass over memory for all tensors together. On
// the CPU, in-place operations tensor by tensor (`_foreach_` operations are the same loop there,
// with temporaries of all tensors at once), because LibTorch 2.11's fused CPU kernels are wrong for
// shards: the last elements of a tensor, which do not fill a vector, are rounded otherwise than the
// rest (fp32: beta is a double there), so that an element's step depends on where its shard ends;
// and the SGD kernel for bf16 stores no parameter but those last ones.

// What a fused call takes: tensors of one dtype on one device.
struct FusedLists {
  std::vector<Tensor> values, grads;
  States states;  // by role
};
using FusedStep = std::function<void(const FusedLists& lists)>;
// `value` and `state`, by role, change in place.
using TensorStep =
    std::function<void(const Tensor& value, const Tensor& grad, const std::vector<Tensor>& state)>;

// fp16 and bf16 are computed in fp32 and rounded once, as CUDA's fused kernels do. Rounding between
// the operations loses small steps, and bf16's vectors and their remainders round differently.
void step_in_opmath(const TrainedTensor& tensor, const std::vector<Tensor>& state,
                    const TensorStep& step) {
  const at::ScalarType dtype = at::toOpMathType(tensor.value.scalar_type());
  if (dtype == tensor.value.scalar_type()) return step(tensor.value, tensor.grad, state);
  const Tensor value = tensor.value.to(dtype);
  std::vector<Tensor> wide_state;
  for (const Tensor& x : state) wide_state.push_back(x.to(dtype));
  step(value, tensor.grad.to(dtype), wide_state);
  tensor.value.copy_(value);
  for (size_t i = 0; i < state.size(); ++i) state[i].copy_(wide_state[i]);
}

void step_all(const std::vector<TrainedTensor>& tensors, const States& states,
              const FusedStep& fused_step, const TensorStep& tensor_step) {
  std::map<std::pair<at::ScalarType, c10::DeviceIndex>, FusedLists> groups;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& value = tensors[i].value;
    if (value.numel() == 0) continue;
    if (!value.is_cuda()) {
      step_in_opmath(tensors[i], states[i], tensor_step);
      continue;
    }
    FusedLists& lists = groups[{value.scalar_type(), value.device().index()}];
    lists.values.push_back(value);
    lists.grads.push_back(tensors[i].grad);
    lists.states.resize(states[i].size());
    for (size_t role = 0; role < states[i].size(); ++role) {
      lists.states[role].push_back(states[i][role]);
    }
  }
  for (const auto& [key, lists] : groups) fused_step(lists);
}

class Sgd final : public Optimizer {
 public:
  explicit Sgd(const SgdOptions& options) : options_(options) {}
  const char* name() const override { return "sgd"; }

  std::vector<std::string> roles() const override {
    if (options_.momentum == 0) return {};
    return {"momentum_buffer"};
  }

 protected:
  // A buffer of zeros becomes momentum * 0 + gradient: the first gradient.
  void update(const std::vector<TrainedTensor>& tensors, const States& states, double learning_rate,
              int64_t) override {
    const SgdOptions& o = options_;
    const FusedStep fused_step = [&](const FusedLists& lists) {
      at::_fused_sgd_(lists.values, lists.grads,
                      lists.states.empty() ? std::vector<Tensor>() : lists.states[0],
                      o.weight_decay, o.momentum, learning_rate, /*dampening=*/0, o.nesterov,
                      /*maximize=*/false, /*is_first_step=*/false);
    };
    step_all(tensors, states, fused_step,
             [&](const Tensor& value, const Tensor& grad, const std::vector<Tensor>& state) {
               Tensor change = o.weight_decay == 0 ? grad : grad.add(value, o.weight_decay);
               if (o.momentum != 0) {
                 const Tensor& buffer = state[0];
                 buffer.mul_(o.momentum).add_(change);
                 change = o.nesterov ? change.add(buffer, o.momentum) : buffer;
               }
               value.add_(change, -learning_rate);
             });
  }

 private:
  SgdOptions options_;
};

class AdamW final : public Optimizer {
 public:
  explicit AdamW(const AdamWOptions& options) : options_(options) {}
  const char* name() const override { return "adamw"; }

  std::vector<std::string> roles() const override { return {"exp_avg", "exp_avg_sq"}; }

 protected:
  void update(const std::vector<TrainedTensor>& tensors, const States& states, double learning_rate,
              int64_t step) override {
    const AdamWOptions& o = options_;
    const FusedStep fused_step = [&](const FusedLists& lists) {
      // The kernel only reads the step, so that one tensor serves the whole list.
      const Tensor at_step =
          at::full({}, step, lists.values[0].options().dtype(at::kFloat).requires_grad(false));
      at::_fused_adamw_(lists.values, lists.grads, lists.states[0], lists.states[1],
                        /*max_exp_avg_sqs=*/{}, std::vector<Tensor>(lists.values.size(), at_step),
                        learning_rate, o.beta1, o.beta2, o.weight_decay, o.epsilon,
                        /*amsgrad=*/false, /*maximize=*/false);
    };
    step_all(tensors, states, fused_step,
             [&](const Tensor& value, const Tensor& grad, const std::vector<Tensor>& state) {
               step_tensor(value, grad, state[0], state[1], learning_rate, step);
             });
  }

 private:
  void step_tensor(const Tensor& value, const Tensor& grad, const Tensor& exp_avg,
                   const Tensor& exp_avg_sq, double learning_rate, int64_t step) const {
    const AdamWOptions& o = options_;
    // Not value * (1 - rate): in fp32 a factor of 1 - 1e-7 is 1 - 1.2e-7.
    if (o.weight_decay != 0) value.add_(value, -learning_rate * o.weight_decay);
    exp_avg.lerp_(grad, 1 - o.beta1);
    exp_avg_sq.mul_(o.beta2).addcmul_(grad, grad, 1 - o.beta2);
    const double correction1 = 1 - std::pow(o.beta1, static_cast<double>(step));
    const double correction2 = 1 - std::pow(o.beta2, static_cast<double>(step));
    const Tensor denominator = exp_avg_sq.sqrt().div_(std::sqrt(correction2)).add_(o.epsilon);
    value.addcdiv_(exp_avg, denominator, -learning_rate / correction1);
  }

  AdamWOptions options_;
};

void check_like_value(const TrainedTensor& tensor, const Tensor& other, const std::string& what) {
  const Tensor& value = tensor.value;
  SP_CHECK(other.defined() && other.sizes() == value.sizes() && other.dtype() == value.dtype() &&
               other.device() == value.device(),
           "the {} of {} must be like the value, {} {} on {}; it is {}", what, tensor.name,
           c10::str(value.sizes()), c10::toString(value.scalar_type()), value.device().str(),
           !other.defined()
               ? "undefined"
               : fmt::format("{} {} on {}", c10::str(other.sizes()),
                             c10::toString(other.scalar_type()), other.device().str()));
}

// Collects what is wrong with options, to say all of it at once.
class Problems {
 public:
  explicit Problems(const char* optimizer) : optimizer_(optimizer) {}
  // Write `good` so that a NaN fails it.
  void require(bool good, const std::string& problem) {
    if (good) return;
    if (!text_.empty()) text_ += "; ";
    text_ += problem;
  }
  void require_not_negative(const char* option, double number) {
    require(number >= 0, fmt::format("{} must not be negative, is {}", option, number));
  }
  void require_decay_rate(const char* option, double number) {
    require(number >= 0 && number < 1, fmt::format("{} must be in [0, 1), is {}", option, number));
  }
  void raise() const {
    if (!text_.empty()) bad_input("{}: {}", optimizer_, text_);
  }

 private:
  const char* optimizer_;
  std::string text_;
};

}  // namespace

void Optimizer::step(const std::vector<TrainedTensor>& tensors, double learning_rate) {
  const at::NoGradGuard no_grad;
  SP_CHECK(learning_rate >= 0, "learning rate {}", learning_rate);
  for (const TrainedTensor& tensor : tensors) {
    SP_CHECK(tensor.value.defined(), "{} has no value", tensor.name);
    check_like_value(tensor, tensor.grad, "gradient");
    for (const auto& [role, by_name] : state_) {
      // Bias correction counts this optimizer's steps, not a tensor's.
      SP_CHECK(by_name.count(tensor.name), "{} has no {} after {} steps", tensor.name, role,
               steps_);
      check_like_value(tensor, by_name.at(tensor.name), role);
    }
  }

  const std::vector<std::string> kept = roles();
  for (const std::string& role : kept) state_[role];  // also where this rank trains nothing
  States states(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    for (const std::string& role : kept) {
      Tensor& state = state_[role][tensors[i].name];
      if (!state.defined()) state = at::zeros_like(tensors[i].value);
      states[i].push_back(state);
    }
  }
  ++steps_;
  update(tensors, states, learning_rate, steps_);
}

void Optimizer::restore(State state, int64_t steps) {
  const std::vector<std::string> kept = roles();
  Problems problems(name());
  problems.require(steps >= 0, fmt::format("a state after {} steps", steps));
  for (const auto& [role, tensors] : state) {
    problems.require(std::find(kept.begin(), kept.end(), role) != kept.end(),
                     fmt::format("the state has {}, which this optimizer does not keep", role));
  }
  for (const std::string& role : kept) {
    const bool before_first_step = state.empty() && steps == 0;
    problems.require(before_first_step || state.count(role),
                     fmt::format("the state has no {}", role));
  }
  problems.raise();
  state_ = std::move(state);
  steps_ = steps;
}

std::unique_ptr<Optimizer> make_sgd(const SgdOptions& options) {
  Problems problems("sgd");
  problems.require_not_negative("momentum", options.momentum);
  problems.require_not_negative("weight_decay", options.weight_decay);
  problems.require(!options.nesterov || options.momentum > 0, "nesterov needs a momentum above 0");
  problems.raise();
  return std::make_unique<Sgd>(options);
}

std::unique_ptr<Optimizer> make_adamw(const AdamWOptions& options) {
  Problems problems("adamw");
  problems.require_decay_rate("beta1", options.beta1);
  problems.require_decay_rate("beta2", options.beta2);
  problems.require_not_negative("epsilon", options.epsilon);
  problems.require_not_negative("weight_decay", options.weight_decay);
  problems.raise();
  return std::make_unique<AdamW>(options);
}

}  // namespace shardproof::fsdp
