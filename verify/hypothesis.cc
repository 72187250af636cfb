#include "verify/hypothesis.h"

#include <fmt/format.h>

#include <cmath>

namespace shardproof::verify {
namespace {

const TensorResult* first_wrong(const CaseResult& result) {
  for (const TensorResult& t : result.tensors) {
    if (t.status == Status::kFail) return &t;
  }
  return nullptr;
}

const CheckResult* failed(const CaseResult& result, const char* name) {
  for (const CheckResult& check : result.checks) {
    if (check.status == Status::kFail && check.name == name) return &check;
  }
  return nullptr;
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

// A result that is a multiple of the right one has an error that the ratio explains.
bool is_scaled(const TensorResult& t) {
  return std::isfinite(t.error) && t.cosine > 0 && std::abs(t.ratio - 1) > 0.9 * t.error;
}

}  // namespace

std::vector<Hypothesis> suggest(const CaseResult& result, const comm::MeshShape& mesh) {
  std::vector<Hypothesis> found;
  if (const CheckResult* check = failed(result, "race")) {
    found.push_back(
        {"race", "a buffer was changed while a collective still read it", check->detail});
  }
  if (const CheckResult* check = failed(result, "deadlock")) {
    found.push_back(
        {"collective-order", "ranks do not make the same calls in the same order", check->detail});
  }
  if (const CheckResult* check = failed(result, "coverage")) {
    found.push_back(
        {"ownership", "a token, head or mask column has no owner or two", check->detail});
  }
  const TensorResult* wrong = first_wrong(result);
  if (!wrong) return found;
  const std::string evidence = fmt::format(
      "{}: error {:.2e}, limit {:.2e}, ratio {:.4f}, cosine "
      "{:.4f}",
      wrong->name, wrong->error, wrong->limit, wrong->ratio, wrong->cosine);
  if (!std::isfinite(wrong->error)) {
    found.push_back({"unwritten",
                     "a result that was not waited for, padding, or rows that nobody "
                     "wrote reached the tensor",
                     evidence});
  } else if (is_scaled(*wrong)) {
    const std::string name = factor_name(wrong->ratio, mesh);
    found.push_back({"scale",
                     fmt::format("{} is {:.4f} times the reference{}", wrong->name, wrong->ratio,
                                 name.empty() ? "" : " (" + name + ")"),
                     evidence});
  } else if (wrong->error < 4 * wrong->reference_error) {
    found.push_back(
        {"precision", "an intermediate is kept or reduced in too low a precision", evidence});
  } else if (wrong->name == "lse") {
    found.push_back({"lse", "the log-sum-exp is laid out or merged wrongly", evidence});
  } else if (wrong->name == "output") {
    found.push_back({"layout",
                     "tokens, heads or mask columns are matched wrongly, or blocks merged "
                     "without their log-sum-exp",
                     evidence});
  } else {
    found.push_back({"backward",
                     "the forward is right and the backward is not: its blocks, their "
                     "order or their reduction",
                     evidence});
  }
  return found;
}

}  // namespace shardproof::verify
