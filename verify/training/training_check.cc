#include "verify/training/training_check.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "base/error.h"
#include "verify/budget.h"
#include "verify/models/model_run.h"
#include "verify/subject_check.h"

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

class Judge {
 public:
  Judge(const TrainingCase& c, const TrainingData& data, at::Device device) : c_(c), data_(data) {
    const double max_norm = c.clip ? kClipNorm : std::numeric_limits<double>::infinity();
    oracle_ = run_reference_training(c, data, /*exact=*/true, max_norm, device);
    plain_ = c.model.dtype == at::kDouble
                 ? oracle_
                 : run_reference_training(c, data, /*exact=*/false, max_norm, device);
    typical_error_ = typical_error();
  }

  void judge_all(const TrainingTensors& tensors, CaseResult& result) const {
    for (const auto& [name, x] : oracle_) {
      if (tensors.contains(name)) continue;
      result.checks.push_back({"coverage", Status::kFail, name + " was not delivered"});
    }
    for (const std::string& name : program_order(c_, data_, tensors)) {
      if (oracle_.contains(name)) judge_one(name, tensors.at(name), result);
    }
    if (c_.clip && oracle_.at("step0/grad_norm").item<double>() < kClipNorm) {
      result.checks.push_back({"coverage", Status::kFail, "nothing was clipped"});
    }
  }

 private:
  static double relative(const Tensor& x, const Tensor& truth) {
    const double norm = truth.norm().item<double>();
    return norm == 0 ? 0 : (x.to(at::kDouble) - truth).norm().item<double>() / norm;
  }

  // The median error of the gradients of the first step without parallelism.
  double typical_error() const {
    std::vector<double> errors;
    for (const auto& [name, x] : plain_) {
      if (name.starts_with("step0/") && name.ends_with(":grad")) {
        errors.push_back(relative(x, oracle_.at(name)));
      }
    }
    return median(std::move(errors));
  }

  void judge_one(const std::string& name, const Tensor& result, CaseResult& verdict) const {
    const Tensor expected = oracle_.at(name).to(at::kDouble).contiguous();
    if (auto wrong = wrong_shape(name, result, expected)) {
      verdict.checks.push_back(std::move(*wrong));
      return;
    }
    const Tensor magnitude = expected.abs();
    Judged judged;
    judged.name = name;
    judged.role = TensorRole::kModelGrad;
    judged.dtype = c_.model.dtype;
    judged.result = result;
    judged.reference = plain_.at(name);
    judged.oracle = elements(expected);
    judged.magnitude = elements(magnitude);
    judged.typical_error = typical_error_;
    if (c_.model.dtype == at::kDouble) judged.fixed_limit = kExactLimit;
    verdict.tensors.push_back(judge(judged).result);
  }

  const TrainingCase& c_;
  const TrainingData& data_;
  TrainingTensors oracle_, plain_;
  double typical_error_ = 0;
};

}  // namespace

CaseResult check_training(const TrainingCase& c, const TrainingSubject& subject, Worlds& worlds) {
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
    if (run.completed) Judge(c, data, worlds.device()).judge_all(run.tensors, result);
  });
}

namespace {

class TrainingCheck final : public Case {
 public:
  TrainingCheck(TrainingCase c, TrainingSubject subject)
      : case_(std::move(c)), subject_(std::move(subject)) {}
  std::string id() const override { return case_.id(); }
  CaseResult check(Worlds& worlds) const override {
    return check_training(case_, subject_, worlds);
  }
  CasePtr shrunk(const std::function<bool(const Case&)>& fails) const override;

 private:
  TrainingCase case_;
  TrainingSubject subject_;
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
    if (smaller.id() != small.id() && fails(TrainingCheck(smaller, subject_))) small = smaller;
  }
  return std::make_shared<TrainingCheck>(small, subject_);
}

}  // namespace

std::vector<CasePtr> training_checks(const std::vector<TrainingCase>& cases,
                                     const TrainingSubject& subject) {
  std::vector<CasePtr> checks;
  for (const TrainingCase& c : cases) checks.push_back(std::make_shared<TrainingCheck>(c, subject));
  return checks;
}

}  // namespace shardproof::verify
