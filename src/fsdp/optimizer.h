// Optimizers over a rank's shards: SGD and AdamW with PyTorch's semantics, element by element, so
// that a shard's step is the whole's.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/trained_tensor.h"

namespace shardproof::fsdp {

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  virtual const char* name() const = 0;

  // Changes the values in place; all must have a gradient (zeros where nothing reached it).
  // Errors (kInternal), nothing changed: no gradient, or one of another shape, dtype or device; a
  // tensor that earlier steps did not have (bias correction counts steps of all); a negative rate.
  void step(const std::vector<TrainedTensor>& tensors, double learning_rate);
  int64_t steps() const { return steps_; }

  // State by role ("exp_avg", ...) and parameter, shaped like the parameter's shard, for
  // checkpoints and checks; empty before the first step.
  using State = std::map<std::string, std::map<std::string, at::Tensor>>;
  const State& state() const { return state_; }
  // Continues where another run stopped, in these tensors, which steps change. No state at all is
  // that before the first step. Errors (kBadInput): roles that this optimizer does not keep, or one
  // that is missing.
  void restore(State state, int64_t steps);
  virtual std::vector<std::string> roles() const = 0;

 protected:
  // `state[i]`: the tensors of roles(), in order, of tensors[i]; zeros at first.
  virtual void update(const std::vector<TrainedTensor>& tensors,
                      const std::vector<std::vector<at::Tensor>>& state, double learning_rate,
                      int64_t step) = 0;

 private:
  State state_;
  int64_t steps_ = 0;
};

// torch.optim.SGD: momentum (buffer starts as the first gradient), dampening 0, L2 weight decay.
struct SgdOptions {
  double momentum = 0;
  double weight_decay = 0;
  bool nesterov = false;
};
// torch.optim.AdamW (decoupled weight decay, arXiv:1711.05101).
struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 1e-2;
};
// Errors (kBadInput): numbers outside their ranges, as torch refuses them; all problems in one.
std::unique_ptr<Optimizer> make_sgd(const SgdOptions& options);
std::unique_ptr<Optimizer> make_adamw(const AdamWOptions& options);

}  // namespace shardproof::fsdp
