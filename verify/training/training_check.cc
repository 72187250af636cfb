#include "verify/training/training_check.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "base/error.h"
#include "verify/budget.h"
#include "verify/common_scale.h"
#include "verify/dtype.h"
#include "verify/models/model_run.h"
#include "verify/subject_check.h"
#include "verify/training/matched_training.h"

namespace shardproof::verify {
namespace {

using at::Tensor;

constexpr double kExactLimit = 1e-11;  // fp64: of every quantity

// "step2/blocks.0.weight:grad": step, then loss, gradients from the last parameter to the first,
// norm, updates, state.
std::vector<std::string> program_order(const TrainingCase& c, const TrainingData& data,
                                       const TrainingTensors& tensors) {
  std::vector<std::string> order;
  const auto& specs = data.parameters.specs();
  for (int step = 0; step < c.steps; ++step) {
    const auto add = [&](const std::string& name) {
      const std::string full = fmt::format("step{}/{}", step, name);
      if (tensors.contains(full)) order.push_back(full);
    };
    add("loss");
    for (size_t i = specs.size(); i-- > 0;) add(specs[i].name + ":grad");
    add("grad_norm");
    for (const char* role : {":momentum_buffer", ":exp_avg", ":exp_avg_sq", ":update", ":ema"}) {
      for (const auto& spec : specs) add(spec.name + role);
    }
  }
  return order;
}

double max_norm_of(const TrainingCase& c) {
  return c.clip ? kClipNorm : std::numeric_limits<double>::infinity();
}

double relative(const Tensor& x, const Tensor& truth) {
  const double norm = truth.norm().item<double>();
  const double error = (x.to(at::kDouble) - truth).norm().item<double>();
  return error == 0 ? 0 : norm == 0 ? std::numeric_limits<double>::infinity() : error / norm;
}

// What all references have in common: judges each tensor that is due, in program order.
void judge_all(const TrainingCase& c, const TrainingData& data, const TrainingTensors& expected,
               const TrainingTensors& tensors, CaseResult& result,
               const std::function<TensorResult(const std::string&, const Tensor&)>& judge_one) {
  for (const auto& [name, x] : expected) {
    if (tensors.contains(name)) continue;
    result.checks.push_back({"coverage", Status::kFail, name + " was not delivered"});
  }
  for (const std::string& name : program_order(c, data, tensors)) {
    if (!expected.contains(name)) continue;
    if (auto wrong = wrong_shape(name, tensors.at(name), expected.at(name))) {
      result.checks.push_back(std::move(*wrong));
    } else {
      result.tensors.push_back(judge_one(name, tensors.at(name)));
    }
  }
  if (c.clip && expected.at("step0/grad_norm").item<double>() < kClipNorm) {
    result.checks.push_back({"coverage", Status::kFail, "nothing was clipped"});
  }
}

// Within what training without parallelism errs in the case's dtype.
class BudgetJudge {
 public:
  BudgetJudge(const TrainingCase& c, const TrainingData& data, at::Device device)
      : c_(c), data_(data) {
    oracle_ = run_reference_training(c, data, /*exact=*/true, max_norm_of(c), device);
    plain_ = c.model.dtype == at::kDouble
                 ? oracle_
                 : run_reference_training(c, data, /*exact=*/false, max_norm_of(c), device);
    // The median error of the gradients of the first step.
    std::vector<double> errors;
    for (const auto& [name, x] : plain_) {
      if (name.starts_with("step0/") && name.ends_with(":grad")) {
        errors.push_back(relative(x, oracle_.at(name)));
      }
    }
    typical_error_ = median(std::move(errors));
  }

  void judge(const TrainingTensors& tensors, const TrainingSubject& subject,
             CaseResult& result) const {
    judge_all(c_, data_, oracle_, tensors, result, [&](const std::string& name, const Tensor& x) {
      return judge_one(name, x, subject.observe);
    });
    if (auto scale = check_common_scale(result.tensors, c_.model.dtype)) {
      result.checks.push_back(std::move(*scale));
    }
  }

 private:
  TensorResult judge_one(const std::string& name, const Tensor& result,
                         const Observer& observe) const {
    const Tensor expected = oracle_.at(name).to(at::kDouble).contiguous();
    const Tensor magnitude = expected.abs();
    Judged judged;
    judged.name = name;
    const bool linear = !name.ends_with(":update") && !name.ends_with(":exp_avg_sq");
    judged.role = linear ? TensorRole::kModelGrad : TensorRole::kModelStep;
    judged.dtype = c_.model.dtype;
    judged.result = result;
    judged.reference = plain_.at(name);
    judged.oracle = elements(expected);
    judged.magnitude = elements(magnitude);
    judged.typical_error = typical_error_;
    if (c_.model.dtype == at::kDouble) judged.fixed_limit = kExactLimit;
    if (observe) observe(judged);
    return verify::judge(judged).result;
  }

  const TrainingCase& c_;
  const TrainingData& data_;
  TrainingTensors oracle_, plain_;
  double typical_error_ = 0;
};

// Bit by bit.
void judge_matched(const TrainingCase& c, const TrainingData& data, const TrainingTensors& tensors,
                   at::Device device, const Observer& observe, CaseResult& result) {
  const TrainingTensors expected = run_matched_training(c, data, max_norm_of(c), device);
  int64_t different = 0;
  judge_all(c, data, expected, tensors, result, [&](const std::string& name, const Tensor& x) {
    TensorResult tensor;
    tensor.name = name;
    tensor.shape = x.sizes().vec();
    tensor.dtype = dtype_name(c.model.dtype);
    const Tensor truth = expected.at(name).to(at::kDouble).contiguous();
    if (observe) {
      Judged judged;
      judged.name = name;
      judged.dtype = c.model.dtype;
      judged.result = x;
      judged.reference = expected.at(name);
      judged.oracle = elements(truth);
      observe(judged);
    }
    tensor.error = relative(x, truth);
    tensor.max_abs = (x.to(at::kDouble) - truth).abs().max().item<double>();
    const bool equal =
        x.scalar_type() == expected.at(name).scalar_type() && at::equal(x, expected.at(name));
    tensor.status = equal ? Status::kPass : Status::kFail;
    different += equal ? 0 : 1;
    return tensor;
  });
  result.checks.push_back(
      {"bitwise", different == 0 ? Status::kPass : Status::kFail,
       different == 0 ? ""
                      : fmt::format("{} of {} tensors have other bits than the run without "
                                    "ranks in the same arithmetic",
                                    different, result.tensors.size())});
}

}  // namespace

CaseResult check_training(const TrainingCase& c, const TrainingSubject& subject, Worlds& worlds,
                          TrainingReference reference) {
  return judged(c.id(), c.model.mesh, [&](CaseResult& result) {
    const TrainingData data = draw_training_data(c);
    const ModelData as_model{data.model, data.parameters, data.batches[0][0].passes, {}};
    // Refuses what cannot be built before a rank waits for another.
    attention_of(c.model, as_model).make_plan();
    attention::make_local_attention(c.model.parallel.backend, worlds.device(), c.model.dtype,
                                    c.model.ragged || c.model.text_aligned);
    RankWorld& world = worlds.get(c.model.mesh.world());
    TrainingRun run = run_parallel_training(c, data, subject, world);
    result.checks = std::move(run.checks);
    if (!run.completed) return;
    if (reference == TrainingReference::kMatched) {
      judge_matched(c, data, run.tensors, worlds.device(), subject.observe, result);
    } else {
      BudgetJudge(c, data, worlds.device()).judge(run.tensors, subject, result);
    }
  });
}

namespace {

class TrainingCheck final : public Case {
 public:
  TrainingCheck(TrainingCase c, TrainingSubject subject, TrainingReference reference)
      : case_(std::move(c)), subject_(std::move(subject)), reference_(reference) {}
  std::string id() const override { return case_.id(); }
  CaseResult check(Worlds& worlds) const override {
    return check_training(case_, subject_, worlds, reference_);
  }
  std::string replay_arguments() const override {
    return reference_ == TrainingReference::kMatched ? " --matched" : "";
  }
  CasePtr shrunk(const std::function<bool(const Case&)>& fails) const override;

 private:
  TrainingCase case_;
  TrainingSubject subject_;
  TrainingReference reference_;
};

// Without one feature after the other, as long as the case still fails.
CasePtr TrainingCheck::shrunk(const std::function<bool(const Case&)>& fails) const {
  TrainingCase small = case_;
  const std::vector<std::function<void(TrainingCase&)>> edits = {
      [](TrainingCase& c) { c.steps = 1; },
      [](TrainingCase& c) { c.accumulation = 1, c.deferred = false; },
      [](TrainingCase& c) { c.clip = false; },
      [](TrainingCase& c) { c.stop = false; },
      [](TrainingCase& c) { c.sgd = true; },
      [](TrainingCase& c) { c.loss = TrainingLoss::kMean; },
      [](TrainingCase& c) { c.keep = c.no_prefetch = c.replicated = c.offload = false; },
      [](TrainingCase& c) { c.shards = c.model.mesh.world(); },
      [](TrainingCase& c) { c.model.recompute = c.model.guided = c.model.ragged = false; },
      [](TrainingCase& c) { c.model.lora = c.model.dropout = false; },
      [](TrainingCase& c) { c.model.layers = 1; },
      [](TrainingCase& c) { c.model.batch = 1; },
  };
  for (const auto& edit : edits) {
    TrainingCase smaller = small;
    edit(smaller);
    if (smaller.id() != small.id() && fails(TrainingCheck(smaller, subject_, reference_)))
      small = smaller;
  }
  return std::make_shared<TrainingCheck>(small, subject_, reference_);
}

}  // namespace

std::vector<CasePtr> training_checks(const std::vector<TrainingCase>& cases,
                                     const TrainingSubject& subject, TrainingReference reference) {
  std::vector<CasePtr> checks;
  for (const TrainingCase& c : cases) {
    checks.push_back(std::make_shared<TrainingCheck>(c, subject, reference));
  }
  return checks;
}

}  // namespace shardproof::verify
