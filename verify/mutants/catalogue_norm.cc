// N: norms of gradients.
#include <ATen/ATen.h>

#include <cmath>

#include "verify/mutants/planting.h"

namespace shardproof::verify {
namespace {

using Tensors = std::vector<fsdp::TrainedTensor>;

// Of this rank's tensors; replicated ones times `weight`.
double squares(const Tensors& tensors, double weight) {
  double sum = 0;
  for (const fsdp::TrainedTensor& t : tensors) {
    sum += t.grad.to(at::kDouble).square().sum().item<double>() * (t.replicated ? weight : 1);
  }
  return sum;
}

double sum_over(const comm::Communicator& group, double x, at::Device device) {
  const at::Tensor number = at::full({1}, x, at::TensorOptions(device).dtype(at::kDouble));
  return group.all_reduce(number).wait().item<double>();
}

TrainingSubject norm(std::function<double(const Tensors&, const comm::FsdpMesh&)> wrong) {
  TrainingSubject subject;
  subject.edit_step = [wrong](fsdp::StepOptions& options, int) { options.norm = wrong; };
  return subject;
}

double over_world(const Tensors& tensors, const comm::FsdpMesh& mesh) {
  return std::sqrt(
      sum_over(mesh.world(), squares(tensors, 1.0 / mesh.world().size()), mesh.device()));
}
// Traffic stays as it is: what is wrong is what is done with it.
double of_own_shard(const Tensors& tensors, const comm::FsdpMesh& mesh) {
  sum_over(mesh.shards(), 0, mesh.device());
  return std::sqrt(squares(tensors, 1));
}
double replicated_each_time(const Tensors& tensors, const comm::FsdpMesh& mesh) {
  return std::sqrt(sum_over(mesh.shards(), squares(tensors, 1), mesh.device()));
}
double mean_of_norms(const Tensors& tensors, const comm::FsdpMesh& mesh) {
  return sum_over(mesh.shards(), std::sqrt(squares(tensors, 1)), mesh.device()) /
         mesh.shards().size();
}

}  // namespace

std::vector<Mutant> norm_mutants() {
  const TrainingSpot sharded{"dp1.ring1.ulysses2.fsdp2"}, hsdp{"dp2.ring1.ulysses2.fsdp2"},
      whole{"dp2.ring1.ulysses1.fsdp1"};
  const std::vector<std::string> norms = {"*/grad_norm"};
  return {
      {.id = "N1",
       .source = "ByteDance-Seed/VeOmni#184",
       .kind = "M-GROUP",
       .text = "squares are summed over the replicas of shards as well",
       .cause = "norm",
       .first_wrong = norms,
       .forward_right = true,
       .plants = plants(hsdp.with("clip"), norm(over_world))},
      {.id = "N2",
       .source = "hiyouga/LlamaFactory#10640",
       .kind = "M-LOCALNORM",
       .text = "each rank clips by the norm of its own shard",
       .cause = "norm",
       .first_wrong = norms,
       .forward_right = true,
       .plants = plants(sharded.with("clip"), norm(of_own_shard))},
      {.id = "N4",
       .source = "mindspore-ai/hyper-parallel#279",
       .kind = "M-DUPNORM",
       .text = "squares of replicated parameters are summed once for every rank",
       .cause = "norm",
       .first_wrong = norms,
       .forward_right = true,
       .plants = plants(sharded.with("repl"), norm(replicated_each_time)),
       .innocent = {plant(sharded, norm(replicated_each_time))}},
      {.id = "N5",
       .source = "deepspeedai/DeepSpeed#8478",
       .kind = "M-LOCALNORM",
       .text = "norms of ranks are averaged where their squares should be summed",
       .cause = "norm",
       .first_wrong = norms,
       .forward_right = true,
       .plants = plants(sharded, norm(mean_of_norms)),
       .innocent = {plant(whole, norm(mean_of_norms))}},
      {.id = "N6",
       .source = "pytorch/pytorch#170862",
       .kind = "M-LOCALNORM",
       .text = "the norm that is reported is the rank's own",
       .cause = "norm",
       .first_wrong = norms,
       .forward_right = true,
       .plants = plants(sharded, norm(of_own_shard))},
  };
}

}  // namespace shardproof::verify
