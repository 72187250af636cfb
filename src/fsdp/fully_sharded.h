// Fully sharded data parallelism (FSDP; ZeRO-3, arXiv:1910.02054; PyTorch's fully_shard) by block:
// every rank keeps its rows of all parameters, a block is gathered before its forward and before
// its backward, freed after them, and its gradients are reduce-scattered as their mean over the
// world.
//
//   fsdp::FullySharded sharded(models::block_names(model), whole, mesh, policy);
//   sharded.gather_root();
//   out = model.forward(sharded.parameters(), inputs, parallel, {.units = &sharded});
//   sharded.backward(loss(out));
//   optimizer.step(sharded.trained(), lr);
//
// The mean over all ranks of the gradients of each rank's loss is the gradient of the mean of their
// losses. With sequence parallelism inside (SP ranks are neighbours in the same world) that is the
// gradient of the replicas' mean loss under each of the conventions of plan::GradientConvention,
// see fsdp/training_step.h for the factor of A.
//
// The same calls are issued in the same order on every rank, whatever a rank's loss reaches: a
// block that gets no gradient on this rank takes part with zeros.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/fsdp_mesh.h"
#include "fsdp/sharded_parameter.h"
#include "models/transformer.h"

namespace shardproof::fsdp {

class FullySharded final : public models::BlockUnits {
 public:
  // `blocks`: modules in the order of the forward; what belongs to none is the root, which is
  // gathered for a whole step. `whole`: the same values on all ranks. The mesh must outlive the
  // object.
  FullySharded(const std::vector<std::string>& blocks, const models::ParameterSet& whole,
               const comm::FsdpMesh& mesh, Policy policy);
  FullySharded(const FullySharded&) = delete;  // graphs point to it
  FullySharded& operator=(const FullySharded&) = delete;

  // What the forward reads. Blocks are there inside of run() only.
  const models::ParameterSet& parameters() const { return parameters_; }
  const Policy& policy() const { return policy_; }
  // All parameters in the order of the set, buffers and frozen ones included.
  std::vector<ShardedParameter*> all();
  std::vector<TrainedTensor> trained() const;

  // Collective. Before a forward; without effect if the root is there.
  void gather_root();
  // Collective. After a forward without backward (evaluation).
  void free_root();
  std::vector<at::Tensor> run(const std::string& name, const models::Block& block,
                              const std::vector<at::Tensor>& inputs) override;

  // Collective. The backward of a scalar loss, which need not depend on any parameter, and the
  // exchange of gradients, which add up over calls. `synchronize` false: gradients stay whole on
  // this rank, added up in the reduce dtype, until a call that synchronizes (gradient accumulation
  // that saves communication for memory).
  void backward(const at::Tensor& loss, bool synchronize = true);
  void zero_grad();

  // Whole parameters on every rank, in the master dtype on the CPU. Collective.
  models::ParameterSet gather_all();

 private:
  class BeforeBackward;
  struct Unit {
    std::string name;
    std::vector<ShardedParameter> parameters;
    std::optional<comm::Pending> gathering;
    bool whole = false;  // or being gathered
  };
  // A run of a block, with the leaves that its graph holds.
  struct Run {
    Unit* unit;
    std::vector<at::Tensor> leaves;
  };
  // Gradients on their way.
  struct Reduction {
    Unit* unit;
    std::vector<at::Tensor> sums;
    std::vector<comm::Pending> pending;
  };

  void start_gather(Unit& unit, const char* mark);
  void finish_gather(Unit& unit);
  void free(Unit& unit);
  std::vector<at::Tensor> renew_leaves(Unit& unit);
  void restore_leaves(const Run& run);
  void start_backward(size_t entry);
  void finish_current();
  void start_reduction(Unit& unit);
  void finish_reduction();
  Unit& unit_of(const std::string& name);

  const comm::FsdpMesh& mesh_;
  Policy policy_;
  models::ParameterSet parameters_;
  std::vector<Unit> units_;  // blocks, then the root
  // What has run since the last backward and awaits its own, in order.
  std::vector<Run> tape_;
  Unit* current_ = nullptr;  // whose backward runs
  std::optional<Reduction> reduction_;
  bool synchronize_ = true;
};

}  // namespace shardproof::fsdp
