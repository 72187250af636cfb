#include "models/lora.h"

#include <ATen/ATen.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "io/safetensors.h"
#include "tests/file_support.h"
#include "tests/models/checkpoint_support.h"

namespace shardproof::models {
namespace {

using tests::contains;
using tests::error_text;
using tests::read_bytes;
using tests::replaced;
using tests::run_tiny;
using tests::TempFolder;
using tests::Tensors;
using tests::tiny_parameters;
using tests::to_map;
using tests::write_bytes;

const std::string kLayer = "transformer_blocks.1.attn.to_q";

double largest(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

// Adapters on the image's attention, with B != 0.
ParameterSet adapted(const LoraConfig& config, uint64_t seed = 1) {
  ParameterSet parameters = tiny_parameters(seed);
  add_lora(parameters, config, seed);
  for (const auto& [name, tensor] : to_map(parameters)) {
    if (!name.ends_with(".lora_B.weight")) continue;
    const int64_t count = tensor.numel();
    parameters.set(name, at::sin(at::arange(count, at::kDouble) + 1).view(tensor.sizes()));
  }
  return parameters;
}

TEST_CASE("new adapters leave the function as it was and train alone", "[lora]") {
  ParameterSet parameters = tiny_parameters(1);
  const at::Tensor before = run_tiny(parameters);
  add_lora(parameters, {.rank = 3, .alpha = 6}, 5);
  CHECK(parameters.adapter_scale() == 2);
  CHECK(at::equal(run_tiny(parameters), before));
  std::set<std::string> trained;
  const ParameterSet leaves = parameters.leaves(at::kFloat, at::kCPU);
  for (const auto& [name, tensor] : leaves.trained()) trained.insert(name);
  std::set<std::string> expected;
  for (const char* block : {"0", "1"}) {
    for (const char* layer : {"to_q", "to_k", "to_v", "to_out.0"}) {
      for (const char* factor : {"A", "B"}) {
        expected.insert(
            fmt::format("transformer_blocks.{}.attn.{}.lora_{}.weight", block, layer, factor));
      }
    }
  }
  CHECK(trained == expected);
}

TEST_CASE("A is drawn as peft does, by seed and layer", "[lora]") {
  const auto drawn = [](uint64_t seed, std::vector<std::string> targets,
                        at::ScalarType dtype = at::kDouble) {
    ParameterSet parameters = tiny_parameters(1, dtype);
    add_lora(parameters, {.rank = 400, .targets = std::move(targets)}, seed);
    return parameters[kLayer + ".lora_A.weight"];
  };
  const at::Tensor a = drawn(3, {"to_q", "to_k"});
  // Kaiming uniform with a = sqrt(5) over 16 inputs: U(-1/4, 1/4), of variance 1/48. 6400 numbers:
  // the deviation's standard error is below 1 %.
  CHECK(a.sizes() == at::IntArrayRef({400, 16}));
  CHECK(a.abs().max().item<double>() <= 0.25);
  CHECK(a.abs().max().item<double>() > 0.24);
  CHECK(std::abs(a.mean().item<double>()) < 0.01);
  CHECK(std::abs(a.std().item<double>() * std::sqrt(48.0) - 1) < 0.05);
  CHECK(at::equal(a, drawn(3, {"to_q"})));
  CHECK(at::equal(a.to(at::kBFloat16), drawn(3, {"to_q"}, at::kBFloat16)));
  CHECK_FALSE(at::equal(a, drawn(4, {"to_q"})));
  ParameterSet two = tiny_parameters(1);
  add_lora(two, {}, 3);
  CHECK_FALSE(at::equal(two[kLayer + ".lora_A.weight"],
                        two["transformer_blocks.0.attn.to_q.lora_A.weight"]));
}

TEST_CASE("adapters compute what weights with scale B A added compute", "[lora]") {
  const LoraConfig config{
      .rank = 2, .alpha = 5, .targets = {"to_q", "to_out.0", "img_mlp.net.2", "add_v_proj"}};
  const ParameterSet parameters = adapted(config);
  ParameterSet merged = tiny_parameters(1);
  int layers = 0;
  for (const auto& [name, b] : to_map(parameters)) {
    if (!name.ends_with(".lora_B.weight")) continue;
    const std::string layer = name.substr(0, name.size() - std::string(".lora_B.weight").size());
    const at::Tensor a = parameters[layer + ".lora_A.weight"];
    merged.set(layer + ".weight", merged[layer + ".weight"] + 2.5 * at::mm(b, a));
    ++layers;
  }
  CHECK(layers == 8);
  const at::Tensor whole = run_tiny(merged);
  CHECK(largest(run_tiny(parameters), whole) < 1e-12);
  CHECK(largest(run_tiny(tiny_parameters(1)), whole) > 1e-3);  // else the adapters do nothing
}

TEST_CASE("what add_lora refuses, it refuses whole", "[lora]") {
  ParameterSet parameters = tiny_parameters(1);
  const size_t count = parameters.specs().size();
  const auto text = [&](const LoraConfig& config) {
    std::string error = error_text([&] { add_lora(parameters, config, 1); });
    CHECK(parameters.specs().size() == count);
    CHECK_FALSE(parameters.specs()[0].frozen);
    return error;
  };
  const std::string all =
      text({.rank = 0, .alpha = NAN, .targets = {"to_q", "o_q", "norm_q", "attn"}});
  CHECK(contains(all, "6 problems"));  // norm_q: one for each block
  CHECK(contains(all, "rank is 0"));
  CHECK(contains(all, "alpha is nan"));
  CHECK(contains(all, "\"o_q\" matches no layer"));
  CHECK(contains(all, "\"attn\" matches no layer"));
  CHECK(contains(all, "\"norm_q\" matches transformer_blocks.0.attn.norm_q, which is no linear"));
  CHECK(contains(text({.targets = {}}), "no target modules"));
  CHECK(contains(text({.targets = {"\xff\n"}}), "matches no layer"));
  add_lora(parameters, {}, 1);
  CHECK(contains(error_text([&] { add_lora(parameters, {}, 1); }), "has adapters already"));
}

TEST_CASE("adapters survive a round trip through peft's files", "[lora]") {
  const TempFolder folder;
  const LoraConfig config{.rank = 3, .alpha = 1.5, .targets = {"to_q", "img_mlp.net.2"}};
  const ParameterSet saved = adapted(config);
  save_lora(folder / "new/one", config, saved);
  const auto file = SafetensorsFile::open(folder / "new/one/adapter_model.safetensors");
  CHECK(file.entries().size() == 8);
  CHECK(file.contains("base_model.model." + kLayer + ".lora_A.weight"));
  CHECK(file.metadata() == std::map<std::string, std::string>{{"format", "pt"}});

  ParameterSet loaded = tiny_parameters(1);
  const LoraConfig read = load_lora(folder / "new/one", loaded);
  CHECK(read.rank == 3);
  CHECK(read.alpha == 1.5);
  CHECK(read.targets == config.targets);
  CHECK(loaded.adapter_scale() == 0.5);
  tests::check_same(saved, loaded);
  CHECK(at::equal(run_tiny(loaded), run_tiny(saved)));
  CHECK(loaded.leaves(at::kDouble, at::kCPU).trained().size() == 8);

  // A second save with another scale and shape takes the place of the first.
  const LoraConfig other{.rank = 1, .alpha = 4, .targets = {"to_k"}};
  save_lora(folder / "new/one", other, adapted(other));
  ParameterSet again = tiny_parameters(1);
  CHECK(load_lora(folder / "new/one", again).rank == 1);
  tests::check_same(adapted(other), again);
  const JsonValue json = read_json_file(folder / "new/one/adapter_config.json");
  CHECK(json.at("peft_type").as_string() == "LORA");
  CHECK(json.at("lora_alpha").as_integer() == 4);
  CHECK(json.at("bias").as_string() == "none");
}

TEST_CASE("what is saved must be the configuration's", "[lora]") {
  const TempFolder folder;
  const LoraConfig config{.rank = 2, .alpha = 2, .targets = {"to_q"}};
  const auto text = [&](const LoraConfig& claimed, const ParameterSet& parameters) {
    return error_text([&] { save_lora(folder / "f", claimed, parameters); });
  };
  const ParameterSet parameters = adapted(config);
  CHECK(contains(text(config, tiny_parameters(1)), "no adapters"));
  CHECK(contains(text({.rank = 2, .alpha = 3, .targets = {"to_q"}}, parameters),
                 "alpha / rank is 1.5, but the adapters' scale is 1"));
  CHECK(contains(text({.rank = 1, .alpha = 1, .targets = {"to_q"}}, parameters),
                 "expected shape [1,16], found [2,16]"));
  CHECK(contains(text({.rank = 2, .alpha = 2, .targets = {"to_k"}}, parameters),
                 kLayer + ".lora_A.weight: its layer is no target module"));
  CHECK_FALSE(std::filesystem::exists(folder / "f"));
  write_bytes(folder / "file", "");
  CHECK(contains(error_text([&] { save_lora(folder / "file", config, parameters); }), "file"));
}

// Adapters of rank 2 on to_q, saved, to be damaged.
class SavedAdapters {
 public:
  SavedAdapters() { save_lora(folder_.path(), kConfig, adapted(kConfig)); }

  Tensors tensors() const {
    const auto file = SafetensorsFile::open(weights());
    Tensors all;
    for (const SafetensorsEntry& entry : file.entries()) all[entry.name] = file.tensor(entry.name);
    return all;
  }
  void write(const Tensors& tensors) const { save_safetensors(weights(), tensors); }
  std::string config() const { return read_bytes(folder_ / "adapter_config.json"); }
  void write_config(std::string_view text) const {
    write_bytes(folder_ / "adapter_config.json", text);
  }
  std::filesystem::path weights() const { return folder_ / "adapter_model.safetensors"; }

  ParameterSet load() const {
    ParameterSet parameters = tiny_parameters(1);
    load_lora(folder_.path(), parameters);
    return parameters;
  }
  std::string error() const {
    ParameterSet parameters = tiny_parameters(1);
    const size_t count = parameters.specs().size();
    std::string text = error_text([&] { load_lora(folder_.path(), parameters); });
    CHECK(parameters.specs().size() == count);
    CHECK_FALSE(parameters.specs()[0].frozen);
    CHECK(contains(text, folder_.path().string()));
    return text;
  }
  // With this option in the configuration; the file is as before afterwards.
  template <class Action>
  auto with_option(const std::string& key, const char* value, const Action& action) const {
    const std::string before = config();
    auto json = nlohmann::json::parse(before);
    json[key] = nlohmann::json::parse(value);
    write_config(json.dump());
    auto result = action();
    write_config(before);
    return result;
  }
  std::string error_with(const std::string& key, const char* value) const {
    INFO(key << ": " << value);
    std::string text = with_option(key, value, [&] { return error(); });
    CHECK(contains(text, "1 problem:"));
    CHECK(contains(text, "adapter_config.json: " + key));
    return text;
  }

 private:
  inline static const LoraConfig kConfig{.rank = 2, .alpha = 4, .targets = {"to_q"}};
  TempFolder folder_;
};

TEST_CASE("options that change nothing are read over", "[lora]") {
  const SavedAdapters saved;
  const ParameterSet expected = saved.load();
  for (const auto& [key, value] : std::vector<std::pair<const char*, const char*>>{
           {"use_dora", "false"},
           {"modules_to_save", "null"},
           {"alpha_pattern", "{}"},
           {"layers_to_transform", "[]"},
           {"bias", "\"none\""},
           {"lora_dropout", "0.0"},
           {"an_option_of_tomorrow", "false"},
           {"init_lora_weights", "\"gaussian\""},
           {"init_lora_weights", "false"},
           {"task_type", "\"FEATURE_EXTRACTION\""},
           {"base_model_name_or_path", "\"Qwen/Qwen-Image\""},
           {"auto_mapping", R"({"base_model_class": "QwenImageTransformer2DModel"})"},
           {"megatron_core", "\"megatron.core\""},
           {"qalora_group_size", "16"},
           {"peft_version", "\"0.18.0\""},
           {"inference_mode", "true"}}) {
    INFO(key << ": " << value);
    tests::check_same(saved.with_option(key, value, [&] { return saved.load(); }), expected);
  }
}

TEST_CASE("options that change the mathematics are refused", "[lora]") {
  const SavedAdapters saved;
  for (const auto& [key, value] :
       std::vector<std::pair<const char*, const char*>>{{"use_rslora", "true"},
                                                        {"use_dora", "true"},
                                                        {"fan_in_fan_out", "true"},
                                                        {"rank_pattern", R"({"to_q": 4})"},
                                                        {"alpha_pattern", R"({"to_q": 4})"},
                                                        {"modules_to_save", R"(["proj_out"])"},
                                                        {"layers_to_transform", "[0]"},
                                                        {"exclude_modules", R"(["to_q"])"},
                                                        {"bias", "\"all\""},
                                                        {"lora_bias", "true"},
                                                        {"lora_dropout", "0.1"},
                                                        {"use_qalora", "true"},
                                                        {"an_option_of_tomorrow", "1"}}) {
    CHECK(contains(saved.error_with(key, value), "is not supported"));
  }
  CHECK(contains(saved.error_with("init_lora_weights", "\"pissa_niter_16\""), "base weights"));
  CHECK(contains(saved.error_with("peft_type", "\"LOHA\""), "expected \"LORA\""));
  CHECK(
      contains(saved.error_with("target_modules", R"(".*\\.to_q")"), "a pattern is not supported"));
  CHECK(contains(saved.error_with("target_modules", "[1]"), "expected a string"));
  CHECK(contains(saved.error_with("r", "2.5"), "expected an integer"));
  CHECK(contains(saved.error_with("lora_alpha", "\"4\""), "expected a number"));
  tests::check_same(saved.load(), saved.load());  // the files are as they were
}

TEST_CASE("damaged and missing adapter files are one error", "[lora]") {
  const SavedAdapters saved;
  const std::string config = saved.config();
  saved.write_config(R"({"peft_type": "LORA", "use_dora": true, "bias": "all"})");
  const std::string weights = read_bytes(saved.weights());
  write_bytes(saved.weights(), std::string_view(weights).substr(0, weights.size() - 1));
  const std::string text = saved.error();
  CHECK(contains(text, "6 problems:"));
  for (const char* part : {"\"r\" is missing", "\"lora_alpha\" is missing",
                           "\"target_modules\" is missing", "use_dora", "bias", "truncated"}) {
    CHECK(contains(text, part));
  }
  std::filesystem::remove(saved.weights());
  saved.write_config("{");
  CHECK(contains(saved.error(), "2 problems:"));
  CHECK(contains(saved.error(), "adapter_config.json: not valid"));
  CHECK(contains(saved.error(), "cannot read"));
  saved.write_config(replaced(config, "\"r\": 2", "\"r\": 0"));
  CHECK(contains(saved.error(), "rank is 0"));
  saved.write_config(replaced(config, "\"to_q\"", "\"to_x\""));
  CHECK(contains(saved.error(), "\"to_x\" matches no layer"));
}

TEST_CASE("adapter tensors must be those of the targets", "[lora]") {
  const SavedAdapters saved;
  const std::string a = "base_model.model." + kLayer + ".lora_A.weight";
  const Tensors tensors = saved.tensors();
  Tensors bad = tensors;
  bad.erase(a);                                                               // B alone
  bad["base_model.model." + kLayer + ".lora_B.weight"] = at::zeros({16, 3});  // shape
  bad["base_model.model.transformer_blocks.9.attn.to_q.lora_A.weight"] = at::ones({2, 16});
  bad["base_model.model.transformer_blocks.0.attn.to_k.lora_B.weight"] = at::ones({16, 2});
  bad["base_model.model." + kLayer + ".lora_magnitude_vector"] = at::ones({16});
  bad["unet." + kLayer + ".lora_A.weight"] = at::ones({2, 16});
  saved.write(bad);
  const std::string text = saved.error();
  CHECK(contains(text, "6 problems:"));
  for (const std::string& part :
       {kLayer + ".lora_A.weight is missing",
        kLayer + ".lora_B.weight: expected shape [16,2], found [16,3]",
        std::string("transformer_blocks.9.attn.to_q.lora_A.weight: the model has no such layer"),
        std::string("transformer_blocks.0.attn.to_k.lora_B.weight: its layer is no target module"),
        kLayer + ".lora_magnitude_vector\": expected base_model.model.<layer>.lora_A.weight",
        "\"unet." + kLayer + ".lora_A.weight\": expected"}) {
    INFO(part);
    CHECK(contains(text, part));
  }
  bad = tensors;
  bad[a] = bad[a].to(at::kLong);
  saved.write(bad);
  CHECK(contains(saved.error(), "expected a floating dtype, found I64"));
  bad = tensors;
  bad["transformer." + kLayer + ".lora_A.weight"] = bad[a];
  saved.write(bad);
  CHECK(contains(saved.error(), "1 problem:"));
  CHECK(contains(saved.error(), "twice"));
  saved.write({});
  CHECK(contains(saved.error(), "4 problems:"));
}

TEST_CASE("diffusers' names are known, and dtypes stay", "[lora]") {
  const SavedAdapters saved;
  const ParameterSet expected = saved.load();
  Tensors renamed;
  for (const auto& [name, tensor] : saved.tensors()) {
    renamed[replaced(name, "base_model.model.", "transformer.")] = tensor.to(at::kFloat);
  }
  saved.write(renamed);
  const ParameterSet loaded = saved.load();
  CHECK(loaded[kLayer + ".weight"].scalar_type() == at::kDouble);
  CHECK(loaded[kLayer + ".lora_A.weight"].scalar_type() == at::kFloat);
  CHECK(at::equal(loaded[kLayer + ".lora_A.weight"],
                  expected[kLayer + ".lora_A.weight"].to(at::kFloat)));
}

TEST_CASE("adapters are not put on top of others", "[lora]") {
  const TempFolder folder;
  const LoraConfig config{.rank = 2, .alpha = 4, .targets = {"to_q"}};
  ParameterSet parameters = adapted(config);
  save_lora(folder / "f", config, parameters);
  CHECK(contains(error_text([&] { load_lora(folder / "f", parameters); }), "has adapters already"));
}

}  // namespace
}  // namespace shardproof::models
