#include "models/lora.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/atomic_file.h"
#include "base/error.h"
#include "base/json_file.h"
#include "comm/random_streams.h"
#include "io/safetensors.h"

namespace shardproof::models {
namespace {

namespace fs = std::filesystem;
using Problems = std::vector<std::string>;

constexpr const char* kConfig = "adapter_config.json";
constexpr const char* kWeights = "adapter_model.safetensors";
constexpr const char* kPrefix = "base_model.model.";      // peft's
constexpr const char* kDiffusersPrefix = "transformer.";  // of diffusers' pipelines
constexpr std::string_view kA = ".lora_A.weight", kB = ".lora_B.weight";
constexpr std::string_view kWeight = ".weight";

// peft's rule for a list of targets.
bool is_target(std::string_view layer, std::string_view target) {
  return layer == target ||
         (layer.ends_with(target) && layer.substr(0, layer.size() - target.size()).ends_with('.'));
}

std::string named(std::string_view layer, std::string_view suffix) {
  return fmt::format("{}{}", layer, suffix);
}

std::string layer_of(std::string_view name, std::string_view suffix) {
  return std::string(name.substr(0, name.size() - suffix.size()));
}

[[noreturn]] void fail(const std::string& what, const Problems& problems) {
  std::string text =
      fmt::format("{}, {} problem{}:", what, problems.size(), problems.size() == 1 ? "" : "s");
  constexpr size_t kShown = 50;
  for (size_t i = 0; i < std::min(problems.size(), kShown); ++i) text += "\n  - " + problems[i];
  if (problems.size() > kShown) text += fmt::format("\n  and {} more", problems.size() - kShown);
  throw Error(ErrorKind::kBadInput, text);
}

// What an action reports as an Error becomes one problem among others.
void attempt(Problems& problems, const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kBadInput) throw;
    problems.emplace_back(error.what());
  }
}

// The linear layers that are targets, by name, with the index of their weight in the list. A
// convolution or a norm that is one would be without its adapter, as Scope::linear alone adds it.
std::map<std::string, size_t> target_layers(const ParameterSet& parameters,
                                            const LoraConfig& config, Problems& problems) {
  std::map<std::string, size_t> layers;
  if (config.targets.empty()) problems.emplace_back("no target modules");
  for (const std::string& target : config.targets) {
    bool found = false;
    for (size_t i = 0; i < parameters.specs().size(); ++i) {
      const ParameterSpec& spec = parameters.specs()[i];
      if (spec.buffer || is_adapter(spec.name) || !spec.name.ends_with(kWeight)) continue;
      const std::string layer = layer_of(spec.name, kWeight);
      if (!is_target(layer, target)) continue;
      found = true;
      if (spec.shape.size() == 2) {
        layers[layer] = i;
      } else {
        problems.push_back(fmt::format("target module {} matches {}, which is no linear layer",
                                       json_quoted(target), layer));
      }
    }
    if (!found) {
      problems.push_back(
          fmt::format("target module {} matches no layer of the model", json_quoted(target)));
    }
  }
  return layers;
}

void check_numbers(const LoraConfig& config, Problems& problems) {
  if (config.rank < 1)
    problems.push_back(fmt::format("rank is {}; expected 1 or more", config.rank));
  if (!std::isfinite(config.alpha)) {
    problems.push_back(fmt::format("alpha is {}; expected a finite number", config.alpha));
  }
}

void require_no_adapters(const ParameterSet& parameters, Problems& problems) {
  for (const ParameterSpec& spec : parameters.specs()) {
    if (!is_adapter(spec.name)) continue;
    problems.push_back(fmt::format("the model has adapters already, {} among them", spec.name));
    return;
  }
}

struct Adapter {
  at::Tensor a, b;
};

// By layer. Everything has been checked.
void add_adapters(ParameterSet& parameters, const LoraConfig& config,
                  const std::map<std::string, Adapter>& adapters) {
  parameters.freeze([](const std::string&) { return true; });
  for (const auto& [layer, adapter] : adapters) {
    parameters.add({named(layer, kA), adapter.a.sizes().vec()}, adapter.a);
    parameters.add({named(layer, kB), adapter.b.sizes().vec()}, adapter.b);
  }
  parameters.set_adapter_scale(config.alpha / static_cast<double>(config.rank));
}

// Options without a bearing on what a loaded adapter computes.
constexpr const char* kIrrelevant[] = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "megatron_core",
    "peft_version", "qalora_group_size",       "revision",       "task_type"};

// An option's value that leaves the mathematics alone, as peft's defaults do.
bool is_off(const nlohmann::json& value) {
  return value.is_null() || value == false || value == 0 || value == "none" ||
         (value.is_structured() && value.empty());
}

// Ways of drawing A and B. Others (PiSSA, OLoRA, CorDA, LoftQ, ...) change the base weights, too.
bool keeps_base(const nlohmann::json& init) {
  return init.is_null() || init.is_boolean() || init == "gaussian" || init == "orthogonal" ||
         init == "eva";
}

void read_targets(const JsonValue& value, LoraConfig& config) {
  if (value.is_string()) value.fail("a pattern is not supported; expected a list of layers' names");
  config.targets.clear();
  for (const JsonValue& target : value.elements()) config.targets.push_back(target.as_string());
}

void read_option(const std::string& key, const JsonValue& value, LoraConfig& config) {
  if (key == "peft_type") {
    if (value.as_string() != "LORA") value.fail("expected \"LORA\"");
  } else if (key == "r") {
    config.rank = value.as_integer();
  } else if (key == "lora_alpha") {
    config.alpha = value.as_number();
  } else if (key == "target_modules") {
    read_targets(value, config);
  } else if (key == "init_lora_weights") {
    if (!keeps_base(value.raw())) {
      value.fail(
          "initialisations that change the base weights are not supported; convert the "
          "adapter to a plain one");
    }
  } else if (std::find(std::begin(kIrrelevant), std::end(kIrrelevant), key) ==
                 std::end(kIrrelevant) &&
             !is_off(value.raw())) {
    value.fail(fmt::format("{} is not supported", json_quoted(value.raw().dump())));
  }
}

std::optional<LoraConfig> read_config(const fs::path& file, Problems& problems) {
  const size_t before = problems.size();
  LoraConfig config;
  attempt(problems, [&] {
    const JsonValue json = read_json_file(file);
    for (const char* key : {"peft_type", "r", "lora_alpha", "target_modules"}) {
      attempt(problems, [&] { json.at(key); });
    }
    for (const auto& member : json.members()) {
      attempt(problems, [&] { read_option(member.first, member.second, config); });
    }
  });
  if (problems.size() == before) check_numbers(config, problems);
  if (problems.size() > before) return std::nullopt;
  return config;
}

// The name within the model; empty: none of the known prefixes.
std::string without_prefix(std::string_view name) {
  for (const std::string_view prefix : {kPrefix, kDiffusersPrefix}) {
    if (name.starts_with(prefix)) return std::string(name.substr(prefix.size()));
  }
  return {};
}

// All A and B of a file, by their names within the model.
std::map<std::string, at::Tensor> read_weights(const fs::path& path, Problems& problems) {
  std::map<std::string, at::Tensor> tensors;
  attempt(problems, [&] {
    const auto file = SafetensorsFile::open(path);
    for (const SafetensorsEntry& entry : file.entries()) {
      const std::string name = without_prefix(entry.name);
      const auto problem = [&](std::string_view text) {
        problems.push_back(
            fmt::format("{}: tensor {}: {}", kWeights, json_quoted(entry.name), text));
      };
      if (!is_adapter(name)) {
        problem(fmt::format("expected {}<layer>{} or {}", kPrefix, kA, kB));
        continue;
      }
      attempt(problems, [&] {
        const at::Tensor tensor = file.tensor(entry.name);
        if (!at::isFloatingType(tensor.scalar_type())) {
          problem("expected a floating dtype, found " + entry.dtype);
        } else if (!tensors.emplace(name, tensor).second) {
          problem("the layer has it twice, under two prefixes");
        }
      });
    }
  });
  return tensors;
}

// Takes a tensor of this shape out of `tensors`.
at::Tensor take(std::map<std::string, at::Tensor>& tensors, const std::string& name,
                const std::vector<int64_t>& shape, Problems& problems) {
  const auto found = tensors.find(name);
  if (found == tensors.end()) {
    problems.push_back(fmt::format("{} is missing", name));
    return {};
  }
  at::Tensor tensor = found->second;
  tensors.erase(found);
  if (tensor.sizes() == shape) return tensor;
  problems.push_back(fmt::format("{}: expected shape [{}], found [{}]", name, fmt::join(shape, ","),
                                 fmt::join(tensor.sizes(), ",")));
  return {};
}

// Every target has both, and nothing else is there.
std::map<std::string, Adapter> match(std::map<std::string, at::Tensor> tensors,
                                     const ParameterSet& parameters, const LoraConfig& config,
                                     Problems& problems) {
  std::map<std::string, Adapter> adapters;
  for (const auto& [layer, index] : target_layers(parameters, config, problems)) {
    const ParameterSpec& weight = parameters.specs()[index];
    const at::Tensor a = take(tensors, named(layer, kA), {config.rank, weight.shape[1]}, problems);
    const at::Tensor b = take(tensors, named(layer, kB), {weight.shape[0], config.rank}, problems);
    if (!a.defined() || !b.defined()) continue;
    const at::Device device = parameters[weight.name].device();
    adapters[layer] = {a.to(device), b.to(device)};
  }
  for (const auto& [name, tensor] : tensors) {
    const std::string layer = layer_of(name, kA);
    problems.push_back(fmt::format("{}: {}", name,
                                   parameters.contains(named(layer, kWeight))
                                       ? "its layer is no target module"
                                       : "the model has no such layer"));
  }
  return adapters;
}

std::string config_text(const LoraConfig& config) {
  nlohmann::json json = {{"bias", "none"},
                         {"fan_in_fan_out", false},
                         {"inference_mode", true},
                         {"init_lora_weights", true},
                         {"lora_alpha", config.alpha},
                         {"lora_dropout", 0.0},
                         {"modules_to_save", nullptr},
                         {"peft_type", "LORA"},
                         {"r", config.rank},
                         {"rank_pattern", nlohmann::json::object()},
                         {"alpha_pattern", nlohmann::json::object()},
                         {"target_modules", config.targets},
                         {"task_type", nullptr},
                         {"use_dora", false},
                         {"use_rslora", false}};
  // peft declares an integer and prints it as one.
  constexpr double kExact = 9007199254740992;  // 2^53
  if (std::trunc(config.alpha) == config.alpha && std::abs(config.alpha) < kExact) {
    json["lora_alpha"] = static_cast<int64_t>(config.alpha);
  }
  return json.dump(2) + "\n";
}

// A decimal fraction such as 1/49 times 49 is not 1; alpha most often is a whole number.
double alpha_of(double scale, int64_t rank) {
  const double alpha = scale * static_cast<double>(rank);
  const double whole = std::round(alpha);
  return whole / static_cast<double>(rank) == scale ? whole : alpha;
}

}  // namespace

bool is_adapter(std::string_view name) { return name.ends_with(kA) || name.ends_with(kB); }

void add_lora(ParameterSet& parameters, const LoraConfig& config, uint64_t seed) {
  Problems problems;
  check_numbers(config, problems);
  require_no_adapters(parameters, problems);
  const auto layers = target_layers(parameters, config, problems);
  if (!problems.empty()) fail("cannot add LoRA adapters", problems);
  std::map<std::string, Adapter> adapters;
  for (const auto& [layer, index] : layers) {
    const at::Tensor& weight = parameters[parameters.specs()[index].name];
    // A seed for each layer: its numbers do not depend on which others are targets. Drawn on the
    // CPU in fp64: nor on the device, and on the dtype by rounding alone.
    at::Generator random = at::make_generator<at::CPUGeneratorImpl>(comm::derive_seed(seed, index));
    // Kaiming uniform with a = sqrt(5): sqrt(3) sqrt(2 / (1 + a^2)) / sqrt(in).
    const double bound = 1 / std::sqrt(static_cast<double>(weight.size(1)));
    const at::Tensor a =
        at::empty({config.rank, weight.size(1)}, at::kDouble).uniform_(-bound, bound, random);
    adapters[layer] = {a.to(weight.device(), weight.scalar_type()),
                       at::zeros({weight.size(0), config.rank}, weight.options())};
  }
  add_adapters(parameters, config, adapters);
}

void save_lora(const fs::path& folder, const LoraConfig& config, const ParameterSet& parameters) {
  Problems problems;
  check_numbers(config, problems);
  std::map<std::string, at::Tensor> adapters;
  for (const ParameterSpec& spec : parameters.specs()) {
    if (is_adapter(spec.name)) adapters[spec.name] = parameters[spec.name].detach();
  }
  if (adapters.empty()) problems.emplace_back("the model has no adapters");
  if (problems.empty()) match(adapters, parameters, config, problems);
  if (const double scale = config.alpha / static_cast<double>(config.rank);
      problems.empty() && scale != parameters.adapter_scale()) {
    problems.push_back(fmt::format("alpha / rank is {}, but the adapters' scale is {}", scale,
                                   parameters.adapter_scale()));
  }
  if (!problems.empty()) {
    fail(fmt::format("cannot save LoRA adapters in {}", folder.string()), problems);
  }
  std::map<std::string, at::Tensor> saved;
  for (const auto& [name, tensor] : adapters) saved[kPrefix + name] = tensor;
  std::error_code error;
  fs::create_directories(folder, error);
  // Another configuration's scale must not meet the new weights, should this process end halfway.
  if (!error) fs::remove(folder / kConfig, error);
  if (error) bad_input("cannot write {}: {}", folder.string(), error.message());
  save_safetensors(folder / kWeights, saved, {{"format", "pt"}});
  write_file_atomically(folder / kConfig, config_text(config));
}

void save_lora_alone(const fs::path& folder, const std::map<std::string, at::Tensor>& adapters,
                     double scale) {
  std::map<std::string, ParameterSpec> weights;  // by layer; their shapes follow from A and B
  LoraConfig config{0, 0, {}};
  for (const auto& [name, tensor] : adapters) {
    SP_CHECK(is_adapter(name) && tensor.dim() == 2, "{}", json_quoted(name));
    const bool a = name.ends_with(kA);
    const std::string layer = layer_of(name, a ? kA : kB);
    ParameterSpec& weight = weights.try_emplace(layer, named(layer, kWeight)).first->second;
    weight.shape.resize(2);
    weight.shape[a ? 1 : 0] = tensor.size(a ? 1 : 0);
    if (a && config.rank == 0) config.rank = tensor.size(0);
  }
  std::vector<ParameterSpec> specs;
  for (const auto& [layer, weight] : weights) {
    config.targets.push_back(layer);
    specs.push_back(weight);
  }
  config.alpha = alpha_of(scale, config.rank);
  ParameterSet parameters(specs);
  parameters.allocate(at::kMeta);
  for (const auto& [name, tensor] : adapters) {
    parameters.add({name, tensor.sizes().vec()}, tensor);
  }
  parameters.set_adapter_scale(config.alpha / static_cast<double>(config.rank));
  save_lora(folder, config, parameters);
}

LoraConfig load_lora(const fs::path& folder, ParameterSet& parameters) {
  Problems problems;
  require_no_adapters(parameters, problems);
  const std::optional<LoraConfig> config = read_config(folder / kConfig, problems);
  const std::map<std::string, at::Tensor> tensors = read_weights(folder / kWeights, problems);
  std::map<std::string, Adapter> adapters;
  if (config) adapters = match(tensors, parameters, *config, problems);
  if (!problems.empty()) {
    fail(fmt::format("LoRA adapters in {} cannot be loaded", folder.string()), problems);
  }
  add_adapters(parameters, *config, adapters);
  return *config;
}

}  // namespace shardproof::models
