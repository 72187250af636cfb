#include "verify/models/model_check.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "base/error.h"
#include "verify/attention/localise.h"
#include "verify/attention/ownership.h"
#include "verify/budget.h"
#include "verify/common_scale.h"
#include "verify/subject_check.h"

namespace shardproof::verify {
namespace {

using at::Tensor;

constexpr double kGoldenLimit = 1e-12;  // fp64 against diffusers' float64
constexpr double kFp32Allowance = 2;    // times the error of diffusers' own float32 run

// Names in program order: what blocks and model return, then gradients from the last parameter to
// the first, then those of the inputs. The first wrong one is named.
std::vector<std::string> program_order(const ModelData& data, const ModelTensors& tensors) {
  std::vector<std::string> order;
  const auto add = [&](const std::string& name) {
    if (tensors.contains(name)) order.push_back(name);
  };
  for (const ModelPass& pass : data.passes) {
    for (int64_t i = 0; i < 1000; ++i) {
      const std::string block = fmt::format("{}block.{}.", pass.prefix, i);
      add(block + "encoder_hidden_states");
      add(block + "hidden_states");
      if (!tensors.contains(block + "hidden_states")) break;
    }
  }
  add("output");
  const auto& specs = data.parameters.specs();
  for (size_t i = specs.size(); i-- > 0;) add(specs[i].name + ":grad");
  for (const auto& [name, tensor] : tensors) {
    if (std::find(order.begin(), order.end(), name) == order.end()) order.push_back(name);
  }
  return order;
}

bool is_gradient(const std::string& name) { return name.ends_with(":grad"); }

TensorRole role_of(const std::string& name) {
  if (!is_gradient(name)) return TensorRole::kModelOutput;
  for (const char* number : {"timestep:grad", "guidance:grad", "img_ids:grad", "txt_ids:grad"}) {
    if (name.ends_with(number)) return TensorRole::kModelConditioning;
  }
  return TensorRole::kModelGrad;
}

// Where in a block's result the error sits.
std::optional<Location> locate(const ModelCase& c, const ModelData& data, const std::string& name,
                               const Tensor& result, const Tensor& oracle) {
  if (is_gradient(name) || name == "output" || result.dim() != 3) return {};
  const Ownership ownership = derive_ownership(attention_of(c, data));
  const bool text = name.ends_with("encoder_hidden_states");
  const auto& homes = text ? ownership.text : ownership.image;
  std::vector<int> owner;
  for (int64_t t = 0; t < result.size(1); ++t)
    owner.push_back(homes[static_cast<size_t>(t)].sp_rank);
  const Tensor error = (result.to(at::kDouble) - oracle).square();
  return localise_tokens(c.mesh, owner,
                         at::nan_to_num(error.sum(-1, true), 1e300, 1e300, 1e300).clamp_max(1e100));
}

// The golden's value of one of our tensors; undefined where it has none.
Tensor golden_value(const ModelGolden& golden, const std::string& name) {
  std::string key = name;
  if (is_gradient(name)) {
    const std::string of = name.substr(0, name.size() - 5);
    key = (golden.parameters.contains(of) ? "grad.param." : "grad.input.") + of;
  }
  const auto it = golden.expected.find(key);
  return it == golden.expected.end() ? Tensor() : it->second;
}

std::optional<double> golden_limit(const ModelCase& c, const ModelGolden& golden,
                                   const std::string& name) {
  if (c.dtype == at::kDouble) return kGoldenLimit;
  if (!is_gradient(name)) return kFp32Allowance * golden.fp32_output;
  const bool parameter = golden.parameters.contains(name.substr(0, name.size() - 5));
  return kFp32Allowance * (parameter ? golden.fp32_parameter_grad : golden.fp32_input_grad);
}

class Judge {
 public:
  Judge(const ModelCase& c, const ModelData& data, const ModelGolden* golden, at::Device device)
      : c_(c), data_(data) {
    // A golden is the oracle where its inputs are held exactly.
    if (c.dtype == at::kDouble || c.dtype == at::kFloat) golden_ = golden;
    const auto reference_policy = models::DtypePolicy::kReference;
    if (!golden_) {
      oracle_ = run_whole_model(c, data, at::kDouble, reference_policy, device, &magnitudes_);
    }
    const bool same = !golden_ && c.dtype == at::kDouble && c.policy() == reference_policy;
    plain_ = same ? oracle_ : run_whole_model(c, data, c.dtype, c.policy(), device);
    typical_error_ = same || golden_ ? 0 : typical_error();
  }

  void judge_all(const ModelTensors& tensors, const ModelSubject& subject,
                 CaseResult& result) const {
    for (const auto& [name, x] : plain_) {
      if (!tensors.contains(name)) {
        result.checks.push_back({"coverage", Status::kFail, name + " was not delivered"});
      }
    }
    for (const std::string& name : program_order(data_, tensors)) {
      if (plain_.contains(name)) judge_one(name, tensors.at(name), subject, result);
    }
    if (auto scale = check_common_scale(result.tensors, c_.dtype)) {
      result.checks.push_back(std::move(*scale));
    }
  }

 private:
  // The median error of the gradients without SP.
  double typical_error() const {
    std::vector<double> errors;
    for (const auto& [name, x] : plain_) {
      if (role_of(name) != TensorRole::kModelGrad) continue;
      const Tensor truth = oracle_.at(name);
      const double norm = truth.norm().item<double>();
      if (norm > 0) errors.push_back((x.to(at::kDouble) - truth).norm().item<double>() / norm);
    }
    return median(std::move(errors));
  }

  void judge_one(const std::string& name, const Tensor& result, const ModelSubject& subject,
                 CaseResult& verdict) const {
    const Tensor expected =
        (golden_ ? golden_value(*golden_, name) : oracle_.at(name)).to(at::kDouble).contiguous();
    const auto known = magnitudes_.find(name);
    const Tensor magnitude = known == magnitudes_.end() ? expected.abs() : known->second;
    if (auto wrong = wrong_shape(name, result, expected)) {
      verdict.checks.push_back(std::move(*wrong));
      return;
    }
    Judged judged;
    judged.name = name;
    judged.role = role_of(name);
    judged.typical_error = is_gradient(name) ? typical_error_ : 0;
    judged.dtype = c_.dtype;
    judged.result = result;
    judged.reference = plain_.at(name);
    judged.oracle = elements(expected);
    judged.magnitude = elements(magnitude);
    if (golden_) judged.fixed_limit = golden_limit(c_, *golden_, name);
    if (subject.observe) subject.observe(judged);
    Judgement judgement = judge(judged);
    if (judgement.result.status == Status::kFail) {
      judgement.result.where = locate(c_, data_, name, result, expected);
    }
    if (judgement.broken_zeros > 0) {
      verdict.checks.push_back({"coverage", Status::kFail,
                                fmt::format("{}: {} elements are not zero although they must be",
                                            name, judgement.broken_zeros)});
    }
    verdict.tensors.push_back(std::move(judgement.result));
  }

  const ModelCase& c_;
  const ModelData& data_;
  const ModelGolden* golden_ = nullptr;
  ModelTensors oracle_;      // fp64, where no golden is
  ModelTensors plain_;       // without SP, in the case's dtype
  ModelTensors magnitudes_;  // where it is known that gradients cancel
  double typical_error_ = 0;
};

void judge_case(const ModelCase& c, const ModelSubject& subject, Worlds& worlds,
                const ModelGolden* golden, CaseResult& result) {
  const ModelData data = golden ? golden_model_data(c, *golden) : draw_model_data(c);
  attention_of(c, data).make_plan();  // refuses impossible combinations before any work
  // Another refusal that all ranks must come to before one of them waits for the others.
  attention::make_local_attention(c.parallel.backend, worlds.device(), c.dtype,
                                  c.ragged || c.text_aligned);
  RankWorld& world = worlds.get(c.mesh.world());
  // First what all ranks do, then what the judging one does alone.
  ModelRun run = run_parallel_model(c, data, subject, world);
  result.checks = std::move(run.checks);
  if (run.completed)
    Judge(c, data, golden, worlds.device()).judge_all(run.tensors, subject, result);
}

}  // namespace

CaseResult check_model(const ModelCase& c, const ModelSubject& subject, Worlds& worlds,
                       const ModelGolden* golden) {
  return judged(c.id(), c.mesh,
                [&](CaseResult& result) { judge_case(c, subject, worlds, golden, result); });
}

std::vector<CasePtr> model_checks(const std::vector<ModelCase>& cases,
                                  const std::map<std::string, ModelGolden>& goldens,
                                  const ModelSubject& subject) {
  return subject_checks(cases, goldens, subject, check_model, [](const ModelCase& c) {
    return c.is_golden() ? c.subject : std::string();
  });
}

}  // namespace shardproof::verify
