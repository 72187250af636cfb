#include "verify/attention/attention_check.h"

#include <ATen/ATen.h>

#include "base/error.h"
#include "verify/attention/localise.h"
#include "verify/budget.h"
#include "verify/common_scale.h"
#include "verify/subject_check.h"

namespace shardproof::verify {
namespace {

using at::Tensor;

struct Named {
  const char* name;
  TensorRole role;
  Tensor AttentionTensors::*tensor;
  std::vector<double> AttentionReference::*oracle;
  std::vector<double> AttentionReference::*magnitude;
};

// Program order: the first wrong one is named.
constexpr Named kTensors[] = {
    {"output", TensorRole::kOutput, &AttentionTensors::out, &AttentionReference::out,
     &AttentionReference::out_abs},
    {"lse", TensorRole::kLse, &AttentionTensors::lse, &AttentionReference::lse, nullptr},
    {"q:grad", TensorRole::kGradQ, &AttentionTensors::dq, &AttentionReference::dq,
     &AttentionReference::dq_abs},
    {"k:grad", TensorRole::kGradK, &AttentionTensors::dk, &AttentionReference::dk,
     &AttentionReference::dk_abs},
    {"v:grad", TensorRole::kGradV, &AttentionTensors::dv, &AttentionReference::dv,
     &AttentionReference::dv_abs},
};

void judge_one(const Named& named, const AttentionCase& c, const AttentionData& data,
               const AttentionTensors& result, const AttentionTensors& reference,
               const AttentionSubject& subject, CaseResult& verdict) {
  Judged judged;
  judged.name = named.name;
  judged.role = named.role;
  judged.dtype = c.dtype;
  judged.result = result.*(named.tensor);
  judged.reference = reference.*(named.tensor);
  judged.oracle = data.reference.*(named.oracle);
  if (named.magnitude) judged.magnitude = data.reference.*(named.magnitude);
  if (subject.observe) subject.observe(judged);
  Judgement judgement = judge(judged);
  if (judgement.result.status == Status::kFail) {
    judgement.result.where = localise(c, named.role, judged.result, judged.oracle);
  }
  if (judgement.broken_zeros > 0) {
    verdict.checks.push_back(
        {"coverage", Status::kFail,
         fmt::format(
             "{}: {} elements are not zero although masks leave nothing that adds up to them",
             named.name, judgement.broken_zeros)});
  }
  verdict.tensors.push_back(std::move(judgement.result));
}

// Ulysses only moves data: on a CPU, where a part of the heads computes the same bits as all of
// them, even shards must give the non-SP bits.
bool must_be_bitwise(const AttentionCase& c, at::Device device) {
  return device.is_cpu() && c.mesh.ring == 1 && c.is_even() &&
         c.text_placement == plan::StreamPlacement::kSharded;
}

CheckResult check_bitwise(const AttentionTensors& result, const AttentionTensors& reference) {
  for (const Named& named : kTensors) {
    const Tensor a = (result.*(named.tensor)).contiguous();
    const Tensor b = (reference.*(named.tensor)).contiguous();
    if (at::equal(a, b)) continue;
    const auto differ = a.ne(b).sum().item<int64_t>();
    return {"bitwise", Status::kFail,
            fmt::format("{}: {} of {} elements differ from the non-SP bits", named.name, differ,
                        a.numel())};
  }
  return {"bitwise", Status::kPass, {}};
}

void judge_case(const AttentionCase& c, const AttentionSubject& subject, Worlds& worlds,
                const AttentionGolden* golden, CaseResult& result) {
  c.make_plan();  // refuses impossible combinations before any work
  const AttentionData data = golden ? golden_attention_data(c, *golden) : draw_attention_data(c);
  // Another refusal that all ranks must come to before one of them waits for the others.
  attention::make_local_attention(c.backend, worlds.device(), c.dtype, data.mask.defined());
  RankWorld& world = worlds.get(c.mesh.world());
  // First what all ranks do, then what the judging one does alone.
  SequenceParallelRun run = run_sequence_parallel(c, data, subject, world);
  result.checks = std::move(run.checks);
  if (!run.completed) return;
  const AttentionTensors reference = run_whole(c, data, worlds.device());
  for (const Named& named : kTensors) {
    judge_one(named, c, data, run.tensors, reference, subject, result);
  }
  if (auto scale = check_common_scale(result.tensors, c.dtype)) {
    result.checks.push_back(std::move(*scale));
  }
  if (must_be_bitwise(c, worlds.device())) {
    result.checks.push_back(check_bitwise(run.tensors, reference));
  }
}

}  // namespace

CaseResult check_attention(const AttentionCase& c, const AttentionSubject& subject, Worlds& worlds,
                           const AttentionGolden* golden) {
  return judged(c.id(), c.mesh,
                [&](CaseResult& result) { judge_case(c, subject, worlds, golden, result); });
}

std::vector<CasePtr> attention_checks(const std::vector<AttentionCase>& cases,
                                      const std::map<std::string, AttentionGolden>& goldens,
                                      const AttentionSubject& subject) {
  return subject_checks(cases, goldens, subject, check_attention,
                        [](const AttentionCase& c) { return c.golden; });
}

}  // namespace shardproof::verify
