// S: factors of losses and gradients.
#include <ATen/ATen.h>

#include "verify/mutants/altered_context.h"
#include "verify/mutants/planting.h"

namespace shardproof::verify {
namespace {

using at::Tensor;
using plan::GradientConvention;
using Place = TrainingSubject::LossPlace;

// The value stays; the gradient is multiplied.
Tensor scale_gradient(const Tensor& loss, double factor) {
  return loss * factor + (loss * (1 - factor)).detach();
}

TrainingSubject loss_times(std::function<double(const Place&)> factor) {
  TrainingSubject subject;
  subject.edit_loss = [factor](const Tensor& loss, const Place& place) {
    return loss * factor(place);
  };
  return subject;
}

TrainingSubject loss_gradient_times(std::function<double(const Place&)> factor) {
  TrainingSubject subject;
  subject.edit_loss = [factor](const Tensor& loss, const Place& place) {
    return scale_gradient(loss, factor(place));
  };
  return subject;
}

TrainingSubject reduced_times(double factor) {
  return with_faults<TrainingSubject>(
      {fault(sim::FaultKind::kScale, "*grads.reduce*", {.factor = factor})});
}

TrainingSubject reported_times(double factor) {
  return with_faults<TrainingSubject>(
      {fault(sim::FaultKind::kScale, "*loss.report*", {.factor = factor})});
}

// A step that takes its gather for one of another convention.
TrainingSubject gather_as(GradientConvention convention) {
  TrainingSubject subject;
  subject.make_context = [convention](const comm::Mesh& mesh, models::ParallelOptions options,
                                      int) -> std::unique_ptr<models::ParallelContext> {
    options.convention = convention;
    return std::make_unique<models::MeshContext>(mesh, std::move(options));
  };
  return subject;
}

const std::vector<std::string> kGradients = {"*:grad"};
const std::vector<std::string> kLoss = {"*/loss"};

}  // namespace

std::vector<Mutant> scale_mutants() {
  const TrainingSpot sp4{"dp1.ring1.ulysses4.fsdp4"}, sp2{"dp2.ring1.ulysses2.fsdp4"},
      dp2{"dp2.ring1.ulysses1.fsdp2"};
  TrainingSubject bf16_sum = reduced_times(0.5);
  bf16_sum.faults.push_back(fault(sim::FaultKind::kRound, "*grads.reduce*"));
  TrainingSubject twice;
  twice.edit_step = [](fsdp::StepOptions& o, int) {
    o.convention = GradientConvention::kSliceThenScaleLoss;
  };
  TrainingSubject own_count;
  own_count.edit_count = [](double, double own) { return own * 2; };  // two replicas
  TrainingSubject accumulated;
  accumulated.edit_loss = [](const Tensor& loss, const Place& place) {
    return scale_gradient(loss, std::pow(2.0, place.micro_batch - 2));  // dp^(i-n), n = 3
  };
  return {
      {.id = "S1",
       .source = "deepspeedai/DeepSpeed#5555",
       .kind = "M-SCALE",
       .text = "gradients are divided by dp x sp where dp is right",
       .cause = "scale",
       .first_wrong = kGradients,
       .forward_right = true,
       .plants = plants(sp4, reduced_times(0.25))},
      {.id = "S2",
       .source = "deepspeedai/DeepSpeed#4530",
       .kind = "M-SCALE, M-LOWPREC-REDUCE",
       .text = "gradients are averaged over sp as well, and summed in bf16",
       .cause = "scale",
       .first_wrong = kGradients,
       .forward_right = true,
       .plants = plants(sp2, bf16_sum)},
      {.id = "S4",
       .source = "ByteDance-Seed/VeOmni#338",
       .kind = "M-SCALE",
       .text = "the loss is divided by a token count that was summed over sp as well",
       .cause = "scale",
       .first_wrong = kLoss,
       .plants = plants(sp4.with("masked"), loss_times([](auto&) { return 0.25; })),
       .innocent = {plant(dp2.with("masked"), loss_times([](auto&) { return 1.0; }))}},
      {.id = "S5",
       .source = "ByteDance-Seed/VeOmni#516",
       .kind = "M-SCALE",
       .text = "every SP rank computes the whole loss and all their gradients add up",
       .cause = "scale",
       .first_wrong = kGradients,
       .forward_right = true,
       .plants = plants(sp2.of("wan"), twice),
       .innocent = {plant(dp2.of("wan"), twice)}},
      {.id = "S6",
       .source = "hao-ai-lab/FastVideo#1138",
       .kind = "M-SCALE",
       .text = "cutting and gathering lack the scaling of their adjoint",
       .cause = "scale",
       .first_wrong = kGradients,
       .forward_right = true,
       .plants = plants(sp2.of("wan"), gather_as(GradientConvention::kSliceThenScaleLoss)),
       .innocent = {plant(dp2.of("wan"), gather_as(GradientConvention::kSliceThenScaleLoss))}},
      {.id = "S8",
       .source = "verl-project/verl-SpeCo#29",
       .kind = "M-SCALE",
       .text =
           "the loss is divided by a global count and its gradient averaged once more; clipping "
           "hides it",
       .cause = "scale",
       .first_wrong = kGradients,
       .forward_right = true,
       .plants = plants(dp2.with("masked.clip"), loss_gradient_times([](auto&) { return 0.5; }))},
      {.id = "S9",
       .source = "meta-pytorch/torchtune#2172",
       .kind = "M-SCALE",
       .text = "losses are normalised by the global token count on top of the mean over ranks",
       .cause = "scale",
       .first_wrong = kLoss,
       .plants = plants(dp2.with("masked"), loss_times([](auto&) { return 0.5; }))},
      {.id = "S10",
       .source = "NVIDIA-NeMo/Automodel#3846",
       .kind = "M-SCALE",
       .text = "a loss that is a local mean is multiplied by dp",
       .cause = "scale",
       .first_wrong = kLoss,
       .plants = plants(dp2, loss_times([](auto&) { return 2.0; }))},
      {.id = "S12",
       .source = "NVIDIA/Megatron-LM#3023",
       .kind = "M-SCALE, M-ACCUM",
       .text = "the mean over dp is taken of the running sum in every micro-batch",
       .cause = "accumulation",
       .first_wrong = kGradients,
       .forward_right = true,
       .plants = plants(dp2.with("acc3"), accumulated)},
      {.id = "S13",
       .source = "verl-project/verl#4250",
       .kind = "M-LABEL, M-SCALE",
       .text = "labels are shifted after the sequence was cut",
       .inexpressible = "losses of diffusion models have no labels that are shifted; the factor of "
                        "its second half is S6's"},
      {.id = "S14",
       .source = "NovaSky-AI/SkyRL#1420",
       .kind = "M-GROUP, M-SCALE",
       .text = "a metric that sp ranks share is summed over them",
       .cause = "metric",
       .first_wrong = kLoss,
       .plants = plants(sp2, reported_times(2))},
      {.id = "S16",
       .source = "NVIDIA/Megatron-LM#7513",
       .kind = "M-SCALE",
       .text = "each replica divides by its own count: a mean of means",
       .cause = "weighting",
       .first_wrong = kLoss,
       .plants = plants(dp2.with("masked"), own_count),
       .innocent = {plant(dp2, own_count)}},
      {.id = "S17",
       .source = "NVIDIA/Megatron-LM#7452",
       .kind = "M-SCALE, M-GROUP, M-PARTIAL",
       .text = "replicated parameters keep the gradient of their own SP rank",
       .cause = "partial",
       .first_wrong = {"*:grad", "coverage"},
       .forward_right = true,
       .plants = plants(sp2.with("repl"), with_faults<TrainingSubject>(
                                              {fault(sim::FaultKind::kLocal, "*grads.reduce*")}))},
      {.id = "S18",
       .source = "pytorch/torchtitan#3280",
       .kind = "M-GROUP",
       .text = "the displayed loss lacks a reduction over sp",
       .cause = "metric",
       .first_wrong = kLoss,
       .plants = plants(sp2, reported_times(0.5))},
      {.id = "S20",
       .source = "pytorch/pytorch#160285",
       .kind = "M-SCALE",
       .text = "every gradient is twice too large while loss curves and AdamW's steps look alike",
       .cause = "scale",
       .first_wrong = kGradients,
       .forward_right = true,
       .plants = plants(sp2, reduced_times(2))},
      {.id = "S21",
       .source = "axolotl-ai-cloud/axolotl#2262",
       .kind = "M-ACCUM",
       .text = "losses of micro-batches are summed where their mean is due",
       .cause = "scale",
       .first_wrong = kLoss,
       .plants = plants(dp2.with("acc4"), loss_times([](auto&) { return 4.0; }))},
      {.id = "S22",
       .source = "verl-project/verl#2857",
       .kind = "M-ACCUM",
       .text = "micro-batches of unequal counts weigh the same",
       .cause = "weighting",
       .first_wrong = kLoss,
       .plants =
           plants(TrainingSpot{"dp1.ring1.ulysses2.fsdp2"}.with("masked.acc3"),
                  loss_times([](const Place& p) { return p.all_valid / (3 * p.own_valid); }))},
  };
}

}  // namespace shardproof::verify
