#include "plan/model_plan.h"

#include <fmt/format.h>

#include <algorithm>

namespace shardproof::plan {
namespace {

std::string describe(const TensorRule& rule) {
  switch (rule.use) {
    case TensorUse::kSplit:
      return fmt::format("split along dimension {} of {}", rule.dim, rule.dims);
    case TensorUse::kGather:
      return fmt::format("gathered along dimension {} of {}", rule.dim, rule.dims);
    case TensorUse::kWhole:
      break;
  }
  return "whole on every rank";
}

}  // namespace

const TensorRule* find_rule(const ModelPlan& plan, const std::string& tensor) {
  const auto it = std::find_if(plan.begin(), plan.end(),
                               [&](const TensorRule& rule) { return rule.tensor == tensor; });
  return it == plan.end() ? nullptr : &*it;
}

std::string to_table(const ModelPlan& plan) {
  size_t tensor = 6, module = 6, use = 3;
  for (const TensorRule& rule : plan) {
    tensor = std::max(tensor, rule.tensor.size());
    module = std::max(module, rule.module.size());
    use = std::max(use, describe(rule).size());
  }
  const auto row = [&](const std::string& a, const std::string& b, const std::string& c,
                       const std::string& d) {
    std::string line = fmt::format("{:<{}}  {:<{}}  {:<{}}  {}", a, tensor, b, module, c, use, d);
    line.erase(line.find_last_not_of(' ') + 1);
    return line + "\n";
  };
  std::string table = row("tensor", "at", "use", "stream");
  for (const TensorRule& rule : plan) {
    table += row(rule.tensor, rule.module.empty() ? "model" : rule.module, describe(rule),
                 rule.stream + (rule.optional ? " (optional)" : ""));
  }
  return table;
}

}  // namespace shardproof::plan
