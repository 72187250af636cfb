#include "models/transformer.h"

#include <algorithm>

#include "base/error.h"
#include "comm/tag.h"
#include "models/flux.h"
#include "models/qwen_image.h"
#include "models/sd3.h"
#include "models/wan.h"

namespace shardproof::models {
namespace {

using Maker = std::unique_ptr<Transformer> (*)(const JsonValue&);
constexpr std::pair<const char*, Maker> kModels[] = {
    {"QwenImageTransformer2DModel", make_qwen_image},
    {"FluxTransformer2DModel", make_flux},
    {"SD3Transformer2DModel", make_sd3},
    {"WanTransformer3DModel", make_wan},
};

constexpr std::pair<const char*, at::Tensor TransformerInputs::*> kInputs[] = {
    {"hidden_states", &TransformerInputs::hidden_states},
    {"encoder_hidden_states", &TransformerInputs::encoder_hidden_states},
    {"encoder_hidden_states_mask", &TransformerInputs::encoder_hidden_states_mask},
    {"pooled_projections", &TransformerInputs::pooled_projections},
    {"timestep", &TransformerInputs::timestep},
    {"guidance", &TransformerInputs::guidance},
    {"img_ids", &TransformerInputs::img_ids},
    {"txt_ids", &TransformerInputs::txt_ids},
};

}  // namespace

std::vector<std::pair<std::string, at::Tensor>> TransformerInputs::tensors() const {
  std::vector<std::pair<std::string, at::Tensor>> all;
  for (const auto& [name, member] : kInputs) {
    if ((this->*member).defined()) all.emplace_back(name, this->*member);
  }
  return all;
}

bool TransformerInputs::is_name(const std::string& name) {
  return std::any_of(std::begin(kInputs), std::end(kInputs),
                     [&](const auto& known) { return name == known.first; });
}

bool TransformerInputs::has_samples(const std::string& name) {
  return is_name(name) && name != "img_ids" && name != "txt_ids";
}

at::Tensor& TransformerInputs::operator[](const std::string& name) {
  for (const auto& [known, member] : kInputs) {
    if (name == known) return this->*member;
  }
  bad_input("no transformer takes an input '{}'", name);
}

std::vector<at::Tensor> run_block(const ForwardOptions& options, const std::string& name,
                                  const Block& block, const std::vector<at::Tensor>& inputs) {
  const Block run = [&](const std::vector<at::Tensor>& x) {
    const comm::CollectiveScope scope(name);
    return options.recompute ? recompute(block, x) : block(x);
  };
  return options.units ? options.units->run(name, run, inputs) : run(inputs);
}

std::vector<std::string> block_names(const Transformer& model) {
  std::vector<std::string> names;
  for (const ParameterSpec& spec : model.parameter_specs()) {
    const size_t list = spec.name.find('.');
    if (list == std::string::npos || !spec.name.substr(0, list).ends_with("blocks")) continue;
    const std::string block = spec.name.substr(0, spec.name.find('.', list + 1));
    if (names.empty() || names.back() != block) names.push_back(block);
  }
  return names;
}

void check_inputs(const plan::ModelPlan& plan, const TransformerInputs& inputs) {
  for (const auto& [name, member] : kInputs) {
    const plan::TensorRule* rule = plan::find_rule(plan, name);
    const at::Tensor& x = inputs.*member;
    if (x.defined() && rule == nullptr) {
      bad_input("the model's plan does not say what to do with input '{}'; it knows\n{}", name,
                plan::to_table(plan));
    }
    if (!x.defined() && rule != nullptr && !rule->optional) {
      bad_input("the model needs input '{}', which is missing", name);
    }
    if (x.defined() && x.dim() != rule->dims) {
      bad_input("input '{}': expected {} dimensions; got shape {}", name, rule->dims,
                c10::str(x.sizes()));
    }
  }
  const int64_t samples = inputs.timestep.size(0);
  for (const auto& [name, x] : inputs.tensors()) {
    if (!TransformerInputs::has_samples(name)) continue;
    if (x.size(0) != samples) {
      bad_input("input '{}' has {} samples, but timestep has {}", name, x.size(0), samples);
    }
  }
}

std::unique_ptr<Transformer> make_transformer(const JsonValue& config) {
  const std::string name = config.at("_class_name").as_string();
  std::string known;
  for (const auto& [class_name, make] : kModels) {
    if (name == class_name) return make(config);
    known += known.empty() ? class_name : std::string(", ") + class_name;
  }
  bad_input("{}: _class_name is {}; known: {}", config.source(), json_quoted(name), known);
}

}  // namespace shardproof::models
