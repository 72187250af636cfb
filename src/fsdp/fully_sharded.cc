#include "fsdp/fully_sharded.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <map>

#include "base/error.h"
#include "comm/tag.h"

namespace shardproof::fsdp {
namespace {

namespace autograd = torch::autograd;
using at::Tensor;
using comm::MarkedScope;

std::string gather_path(const std::string& unit) { return unit + "/weights.gather"; }
std::string reduce_path(const std::string& unit) { return unit + "/grads.reduce"; }

// The block that a parameter belongs to; the number of blocks for the root.
size_t unit_index(const std::vector<std::string>& blocks, const std::string& parameter) {
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (parameter.starts_with(blocks[i] + ".")) return i;
  }
  return blocks.size();
}

}  // namespace

// The identity on a block's outputs; its backward comes before the block's.
class FullySharded::BeforeBackward : public autograd::Function<BeforeBackward> {
 public:
  struct Hook : torch::CustomClassHolder {
    FullySharded* sharded = nullptr;
    size_t entry = 0;
  };
  static autograd::variable_list forward(autograd::AutogradContext* ctx,
                                         c10::intrusive_ptr<Hook> hook, at::TensorList outputs) {
    ctx->saved_data["hook"] = c10::IValue::make_capsule(std::move(hook));
    ctx->set_materialize_grads(false);
    return outputs.vec();
  }
  static autograd::variable_list backward(autograd::AutogradContext* ctx,
                                          const autograd::variable_list& grads) {
    const auto capsule = ctx->saved_data["hook"].toCapsule();
    const auto& hook = static_cast<const Hook&>(*capsule);
    hook.sharded->start_backward(hook.entry);
    autograd::variable_list result = {Tensor()};
    result.insert(result.end(), grads.begin(), grads.end());
    return result;
  }
};

FullySharded::FullySharded(const std::vector<std::string>& blocks,
                           const models::ParameterSet& whole, const comm::FsdpMesh& mesh,
                           Policy policy)
    : mesh_(mesh), policy_(std::move(policy)), parameters_(whole.specs()) {
  parameters_.set_adapter_scale(whole.adapter_scale());
  for (const std::string& block : blocks) units_.push_back({block, {}, {}, false});
  units_.push_back({"root", {}, {}, false});
  for (const models::ParameterSpec& spec : whole.specs()) {
    const bool replicated = spec.buffer || (policy_.replicated && policy_.replicated(spec.name));
    const ShardLayout layout{rows_of(spec.shape), replicated ? 1 : mesh.shards().size()};
    Unit& unit = units_[unit_index(blocks, spec.name)];
    unit.parameters.emplace_back(spec, whole[spec.name], layout,
                                 replicated ? 0 : mesh.shards().rank(), policy_, mesh.device());
    parameters_.set(spec.name, unit.parameters.back().whole());
  }
}

std::vector<ShardedParameter*> FullySharded::all() {
  std::map<std::string, ShardedParameter*> by_name;
  for (Unit& unit : units_) {
    for (ShardedParameter& parameter : unit.parameters) by_name[parameter.name()] = &parameter;
  }
  std::vector<ShardedParameter*> ordered;
  for (const auto& spec : parameters_.specs()) ordered.push_back(by_name.at(spec.name));
  return ordered;
}

std::vector<TrainedTensor> FullySharded::trained() const {
  std::vector<TrainedTensor> tensors;
  for (const Unit& unit : units_) {
    for (const ShardedParameter& parameter : unit.parameters) {
      if (parameter.trained()) tensors.push_back(parameter.trained_tensor());
    }
  }
  return tensors;
}

FullySharded::Unit& FullySharded::unit_of(const std::string& name) {
  for (Unit& unit : units_) {
    if (unit.name == name) return unit;
  }
  internal_error("the model runs a block '{}' that is not among the sharded ones", name);
}

void FullySharded::start_gather(Unit& unit, const char* mark) {
  if (unit.whole) return;
  const at::NoGradGuard no_grad;
  const MarkedScope scope(gather_path(unit.name), mark);
  std::vector<Tensor> inputs, outputs;
  for (ShardedParameter& parameter : unit.parameters) {
    Tensor input = parameter.gather_input(), output = parameter.allocate();
    if (parameter.replicated()) {
      output.copy_(input);
    } else {
      inputs.push_back(std::move(input));
      outputs.push_back(std::move(output));
    }
  }
  unit.gathering = mesh_.shards().all_gather_step(std::move(inputs), std::move(outputs));
  unit.whole = true;
}

void FullySharded::finish_gather(Unit& unit) {
  if (!unit.gathering) return;
  unit.gathering->wait();
  unit.gathering.reset();
}

void FullySharded::free(Unit& unit) {
  if (!unit.whole) return;
  finish_gather(unit);  // one that was prefetched and not used
  for (ShardedParameter& parameter : unit.parameters) parameter.free();
  unit.whole = false;
}

std::vector<Tensor> FullySharded::renew_leaves(Unit& unit) {
  std::vector<Tensor> leaves;
  for (ShardedParameter& parameter : unit.parameters) {
    if (!parameter.trained()) continue;
    leaves.push_back(parameter.renew_whole());
    parameters_.set(parameter.name(), leaves.back());
  }
  return leaves;
}

// What a recomputation reads and whose gradients are taken are the run's own.
void FullySharded::restore_leaves(const Run& run) {
  auto leaf = run.leaves.begin();
  for (ShardedParameter& parameter : run.unit->parameters) {
    if (!parameter.trained()) continue;
    parameter.set_whole(*leaf);
    parameters_.set(parameter.name(), *leaf++);
  }
}

void FullySharded::gather_root() {
  start_gather(units_.back(), "");
  finish_gather(units_.back());
}

void FullySharded::free_root() {
  SP_CHECK(tape_.empty(), "the root is freed while {} blocks await their backward", tape_.size());
  for (Unit& unit : units_) free(unit);
}

std::vector<Tensor> FullySharded::run(const std::string& name, const models::Block& block,
                                      const std::vector<Tensor>& inputs) {
  Unit& unit = unit_of(name);
  start_gather(unit, "");
  finish_gather(unit);
  Unit& next = *(&unit + 1);  // the root is behind the last block
  if (policy_.prefetch && &next != &units_.back()) start_gather(next, "");
  Run this_run{&unit, renew_leaves(unit)};
  std::vector<Tensor> outputs = block(inputs);
  const bool graph =
      at::GradMode::is_enabled() && std::any_of(outputs.begin(), outputs.end(),
                                                [](const Tensor& x) { return x.requires_grad(); });
  if (policy_.reshard_after_forward || !graph) free(unit);
  if (!graph) return outputs;
  auto hook = c10::make_intrusive<BeforeBackward::Hook>();
  hook->sharded = this;
  hook->entry = tape_.size();
  tape_.push_back(std::move(this_run));
  return BeforeBackward::apply(std::move(hook), at::TensorList(outputs));
}

// The backward of the block at `entry` is about to begin. Blocks behind it on the tape have ended
// theirs, or get none on this rank; on other ranks they may, so their calls are made here, too.
void FullySharded::start_backward(size_t entry) {
  while (tape_.size() > entry) {
    finish_current();
    const Run run = std::move(tape_.back());
    tape_.pop_back();
    Unit& unit = *run.unit;
    restore_leaves(run);
    start_gather(unit, comm::kAdjointMark);
    finish_gather(unit);
    current_ = &unit;
    if (policy_.prefetch && !tape_.empty()) start_gather(*tape_.back().unit, comm::kAdjointMark);
  }
}

void FullySharded::finish_current() {
  if (!current_) return;
  Unit& unit = *std::exchange(current_, nullptr);
  start_reduction(unit);
  // Not if it was called twice in the forward and comes once more.
  if (tape_.empty() || tape_.back().unit != &unit) free(unit);
}

void FullySharded::start_reduction(Unit& unit) {
  std::vector<Tensor> sharded, sharded_sums, replicated;
  Reduction reduction{&unit, {}, {}};
  for (ShardedParameter& parameter : unit.parameters) {
    if (!parameter.trained()) continue;
    if (!synchronize_) {
      parameter.keep_gradient();
      continue;
    }
    Tensor grad = parameter.take_gradient();
    if (parameter.replicated()) {
      reduction.sums.push_back(grad);
      replicated.push_back(std::move(grad));
    } else {
      auto shape = grad.sizes().vec();
      shape[0] /= mesh_.shards().size();
      sharded_sums.push_back(at::empty(shape, grad.options()));
      reduction.sums.push_back(sharded_sums.back());
      sharded.push_back(std::move(grad));
    }
  }
  // One block's gradients travel while the next computes.
  finish_reduction();
  if (reduction.sums.empty()) return;
  const MarkedScope scope(reduce_path(unit.name), comm::kAdjointMark);
  if (!sharded.empty()) {
    reduction.pending.push_back(
        mesh_.shards().reduce_scatter_step(std::move(sharded), std::move(sharded_sums)));
  }
  if (!replicated.empty()) {
    reduction.pending.push_back(mesh_.world().all_reduce_step(std::move(replicated)));
  }
  reduction_ = std::move(reduction);
}

void FullySharded::finish_reduction() {
  if (!reduction_) return;
  Reduction reduction = std::move(*reduction_);
  reduction_.reset();
  for (comm::Pending& pending : reduction.pending) pending.wait();
  std::vector<ShardedParameter*> owners;
  for (ShardedParameter& parameter : reduction.unit->parameters) {
    if (parameter.trained()) owners.push_back(&parameter);
  }
  if (mesh_.replicas().size() > 1) {
    const MarkedScope scope(reduce_path(reduction.unit->name), comm::kAdjointMark);
    std::vector<Tensor> shards;
    for (size_t i = 0; i < owners.size(); ++i) {
      if (!owners[i]->replicated()) shards.push_back(reduction.sums[i]);
    }
    mesh_.replicas().all_reduce_step(std::move(shards)).wait();
  }
  for (size_t i = 0; i < owners.size(); ++i) {
    owners[i]->add_reduced(reduction.sums[i], mesh_.world().size());
  }
}

void FullySharded::backward(const Tensor& loss, bool synchronize) {
  synchronize_ = synchronize;
  if (loss.requires_grad()) autograd::backward({loss}, {});
  start_backward(0);  // what the loss did not reach
  finish_current();
  start_reduction(units_.back());
  finish_reduction();
  free_root();
}

void FullySharded::zero_grad() {
  for (Unit& unit : units_) {
    for (ShardedParameter& parameter : unit.parameters) parameter.zero_grad();
  }
}

models::ParameterSet FullySharded::gather_all() {
  models::ParameterSet whole(parameters_.specs());
  whole.set_adapter_scale(parameters_.adapter_scale());
  const at::NoGradGuard no_grad;
  const comm::CollectiveScope scope("weights.export");
  for (ShardedParameter* parameter : all()) {
    Tensor rows = parameter->rows().to(mesh_.device());
    if (!parameter->replicated()) {
      std::vector<int64_t> counts;
      for (int i = 0; i < parameter->layout().shards; ++i) {
        counts.push_back(parameter->layout().shard(i).size());
      }
      rows = mesh_.shards().all_gather(rows.contiguous(), counts).wait();
    }
    whole.set(parameter->name(), rows.cpu().view(parameter->shape()));
  }
  return whole;
}

}  // namespace shardproof::fsdp
