#include "verify/hypothesis.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>

namespace shardproof::verify {
namespace {

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

bool is_gradient(const TensorResult& t) { return t.name.ends_with(":grad"); }
bool is_loss(const TensorResult& t) { return t.name.ends_with("/loss"); }
bool is_norm(const TensorResult& t) { return t.name.ends_with("/grad_norm"); }
// Optimizer state, updates, averages.
bool is_step(const TensorResult& t) { return !is_gradient(t) && contains(t.name, ":"); }

std::string numbers(const TensorResult& t) {
  return fmt::format("{}: error {:.2e}, limit {:.2e}, ratio {:.4f}, cosine {:.4f}", t.name, t.error,
                     t.limit, t.ratio, t.cosine);
}

std::string factor_name(double ratio, const comm::MeshShape& mesh) {
  const double sp = mesh.sp(), dp = mesh.dp;
  const std::pair<double, const char*> known[] = {{sp, "sp"},
                                                  {1 / sp, "1/sp"},
                                                  {sp * sp, "sp^2"},
                                                  {1 / (sp * sp), "1/sp^2"},
                                                  {dp, "dp"},
                                                  {1 / dp, "1/dp"},
                                                  {1 / (dp * sp), "1/(dp*sp)"},
                                                  {dp * sp, "dp*sp"},
                                                  {1.0 / mesh.ring, "1/ring"},
                                                  {1.0 / mesh.ulysses, "1/ulysses"}};
  for (const auto& [value, name] : known) {
    if (value != 1 && std::abs(ratio / value - 1) < 0.02) return name;
  }
  return {};
}

// A multiple of the right tensor: the ratio explains all of the error that rounding does not.
bool is_scaled(const TensorResult& t) {
  const double rounding = 1.5 * t.reference_error;
  const double error = std::sqrt(std::max(0.0, t.error * t.error - rounding * rounding));
  return std::isfinite(t.error) && t.cosine > 0 && std::abs(t.ratio - 1) > 0.99 * error;
}

// What the detectors look at.
struct Symptoms {
  const CaseResult& result;
  const comm::MeshShape& mesh;

  const CheckResult* failed(const char* check, const char* saying = "") const {
    for (const CheckResult& c : result.checks) {
      if (c.status == Status::kFail && c.name == check && contains(c.detail, saying)) return &c;
    }
    return nullptr;
  }
  const TensorResult* first(bool (*of_kind)(const TensorResult&)) const {
    for (const TensorResult& t : result.tensors) {
      if (t.status == Status::kFail && of_kind(t)) return &t;
    }
    return nullptr;
  }
  const TensorResult* first_wrong() const {
    return first([](const TensorResult&) { return true; });
  }
  // A word of the case's variant.
  bool has(const char* word) const { return contains(result.id, word); }
  // The whole of what is wrong is one factor; a loss alone is a number and always is.
  bool is_one_factor() const {
    const TensorResult* gradient = first(is_gradient);
    return is_scaled(gradient && is_loss(*first_wrong()) ? *gradient : *first_wrong());
  }
};

using Found = std::optional<Hypothesis>;

// ---- what the checks say

Found race(const Symptoms& s) {
  const CheckResult* check = s.failed("race");
  if (!check) return {};
  return Hypothesis{"race", "a buffer was changed while a collective still read it", check->detail};
}

Found missing_wait(const Symptoms& s) {
  const CheckResult* check = s.failed("trace", "without waiting");
  if (!check) return {};
  return Hypothesis{"missing-wait", "a result was read, or left, that was not waited for",
                    check->detail};
}

Found collective_order(const Symptoms& s) {
  const CheckResult* check = s.failed("deadlock");
  if (!check) check = s.failed("trace", "contradict");
  if (!check && s.result.tensors.empty()) check = s.failed("trace");
  if (!check) return {};
  return Hypothesis{"collective-order", "ranks do not make the same calls in the same order",
                    check->detail};
}

Found partial(const Symptoms& s) {
  const CheckResult* check = s.failed("coverage", "differs from that");
  if (!check) return {};
  return Hypothesis{"partial", "what all ranks should have in common was not reduced over them",
                    check->detail};
}

Found ownership(const Symptoms& s) {
  const CheckResult* check = s.failed("coverage");
  if (!check || s.failed("coverage", "differs from that")) return {};
  // NaN, wherever it comes from, is not zero where zeros should be.
  const TensorResult* wrong = s.first_wrong();
  if (wrong && !std::isfinite(wrong->error) && contains(check->detail, "not zero")) return {};
  return Hypothesis{"ownership", "a token, head or mask column has no owner or two", check->detail};
}

Found bypass(const Symptoms& s) {
  const CheckResult* check = s.failed("trace", "no block talks");
  if (!check) return {};
  return Hypothesis{"bypass", "ranks compute for themselves: the parallel path was not taken",
                    check->detail};
}

Found common_scale(const Symptoms& s) {
  const CheckResult* check = s.failed("scale");
  if (!check || s.first_wrong()) return {};
  return Hypothesis{"scale", check->detail, "no single tensor shows it"};
}

Found nondeterminism(const Symptoms& s) {
  const CheckResult* check = s.failed("bitwise");
  if (!check || s.first_wrong()) return {};
  return Hypothesis{"nondeterminism",
                    "results are within their budget and have other bits: a sum whose order is not "
                    "fixed",
                    check->detail};
}

// ---- what the numbers say; `t` is the first wrong tensor. Only one of these is taken.

Found unwritten(const Symptoms&, const TensorResult& t) {
  if (std::isfinite(t.error)) return {};
  return Hypothesis{"unwritten",
                    "a result that was not waited for, padding, or rows that nobody wrote reached "
                    "the tensor",
                    numbers(t)};
}

Found norm(const Symptoms& s, const TensorResult& t) {
  if (!is_norm(t)) return {};
  return Hypothesis{"norm",
                    fmt::format("the gradients are right and their norm is {:.4f} times what it "
                                "should be: squares were summed over the wrong ranks, or those of "
                                "replicated parameters more than once",
                                t.ratio),
                    numbers(t)};
}

Found metric(const Symptoms& s, const TensorResult& t) {
  if (!is_loss(t) || s.first(is_gradient)) return {};
  const std::string name = factor_name(t.ratio, s.mesh);
  return Hypothesis{"metric",
                    fmt::format("the loss that is reported is {:.4f} times the right one{} and its "
                                "gradients are right: a reduction of the number itself",
                                t.ratio, name.empty() ? "" : " (" + name + ")"),
                    numbers(t)};
}

Found missing_gradient(const Symptoms& s, const TensorResult&) {
  const TensorResult* zero = s.first(
      [](const TensorResult& t) { return is_gradient(t) && t.ratio == 0 && t.error > 0.999; });
  if (!zero) return {};
  return Hypothesis{"missing-gradient", zero->name + " is zero: the path of its gradient is cut",
                    numbers(*zero)};
}

Found scale(const Symptoms& s, const TensorResult& t) {
  if (!s.is_one_factor()) return {};
  const std::string name = factor_name(t.ratio, s.mesh);
  return Hypothesis{"scale",
                    fmt::format("{} is {:.4f} times the reference{}", t.name, t.ratio,
                                name.empty() ? "" : " (" + name + ")"),
                    numbers(t)};
}

Found random(const Symptoms& s, const TensorResult& t) {
  const bool dropout = is_loss(t) && s.has(".drop");
  const bool replica = s.mesh.dp > 1 && t.where && t.where->rank >= s.mesh.sp();
  if (!dropout && !replica) return {};
  return Hypothesis{"random",
                    dropout
                        ? "ranks drop other elements than a run without parallelism: masks must "
                          "be the same inside sp and differ between replicas"
                        : "only replicas behind the first are wrong: their noise, timesteps or "
                          "seeds",
                    numbers(t)};
}

Found weighting(const Symptoms& s, const TensorResult& t) {
  if (!is_loss(t) || !s.has(".masked")) return {};
  return Hypothesis{"weighting",
                    "the loss is a mean of means: parts with unequal counts weigh the same",
                    numbers(t)};
}

Found accumulation(const Symptoms& s, const TensorResult& t) {
  if (!is_gradient(t) || !s.has(".acc") || is_scaled(t)) return {};
  return Hypothesis{"accumulation",
                    "the loss is right and its gradients are not a multiple of the right ones: "
                    "micro-batches do not add up",
                    numbers(t)};
}

Found step(const Symptoms&, const TensorResult& t) {
  if (!is_step(t)) return {};
  return Hypothesis{"step", "gradients and norm are right and what the optimizer does is not",
                    numbers(t)};
}

// Errors of the size of another dtype's rounding, in all directions.
Found precision(const Symptoms&, const TensorResult& t) {
  const double narrower = t.dtype == "fp64" ? 1e-5 : t.dtype == "fp32" ? 1e-2 : 0;
  if (t.error >= 4 * t.reference_error && !(t.error < narrower && t.cosine > 0.9999)) return {};
  return Hypothesis{"precision", "an intermediate is kept or reduced in too low a precision",
                    numbers(t)};
}

Found place(const Symptoms&, const TensorResult& t) {
  if (t.name == "lse") {
    return Hypothesis{"lse", "the log-sum-exp is laid out or merged wrongly", numbers(t)};
  }
  if (is_gradient(t)) {
    return Hypothesis{"backward",
                      "the forward is right and the backward is not: its blocks, their order or "
                      "their reduction",
                      numbers(t)};
  }
  return Hypothesis{
      "layout",
      "tokens, heads, positions or mask columns are matched wrongly, or blocks merged "
      "without their log-sum-exp",
      numbers(t)};
}

}  // namespace

std::vector<Hypothesis> suggest(const CaseResult& result, const comm::MeshShape& mesh) {
  const Symptoms symptoms{result, mesh};
  std::vector<Hypothesis> found;
  for (const auto detect : {race, missing_wait, collective_order, partial, ownership, bypass,
                            common_scale, nondeterminism}) {
    if (Found hypothesis = detect(symptoms)) found.push_back(std::move(*hypothesis));
  }
  const TensorResult* wrong = symptoms.first_wrong();
  if (!wrong) return found;
  for (const auto detect : {unwritten, norm, metric, missing_gradient, scale, random, weighting,
                            accumulation, step, precision, place}) {
    if (Found hypothesis = detect(symptoms, *wrong)) {
      found.push_back(std::move(*hypothesis));
      break;
    }
  }
  return found;
}

}  // namespace shardproof::verify
