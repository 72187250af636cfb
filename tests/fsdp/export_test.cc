// An export is what gather_all() gives, whatever world saved the shards; bad input leaves nothing.
#include "fsdp/export.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <nlohmann/json.hpp>

#include "base/json_file.h"
#include "fsdp/checkpoint_manifest.h"
#include "fsdp/training_state.h"
#include "io/safetensors.h"
#include "models/checkpoint.h"
#include "models/lora.h"
#include "sim/world.h"
#include "tests/file_support.h"
#include "tests/fsdp/checkpoint_support.h"
#include "tests/fsdp/shard_support.h"

namespace shardproof::fsdp {
namespace {

namespace fs = std::filesystem;
using at::Tensor;
using tests::contains;
using tests::error_text;
using tests::read_bytes;
using tests::same_bits;
using tests::TempFolder;
using tests::write_bytes;

constexpr const char* kWeights = "diffusion_pytorch_model.safetensors";
// A model with a buffer (its position embedding).
const fs::path kModel = fs::path(SHARDPROOF_SOURCE_DIR) / "datasets/goldens/sd35";

// Rows that three ranks hold as 4, 4, 2; as 1, 1, 1; and as 1, 1, none; and a scalar.
models::ParameterSet toy_parameters() {
  models::ParameterSet whole(
      {{"a.weight", {10, 7}}, {"a.bias", {3}}, {"b.table", {2, 3, 2}}, {"b.scale", {}}});
  at::Generator random = at::make_generator<at::CPUGeneratorImpl>(5);
  for (const auto& spec : whole.specs()) {
    whole.set(spec.name, tests::normal(spec.shape, at::kDouble, random));
  }
  return whole;
}

struct World {
  int ranks = 1, shards = 1;
  Policy policy = Policy::uniform(at::kFloat);
  std::string model = "toy";
  bool average = true;
};
using Values = std::map<std::string, Tensor>;
struct Gathered {
  Values parameters, averages;  // averages of one rank alone: of worlds of one
};

// Two steps on a world of ranks, saved in `folder`; what gather_all() gives then.
Gathered train_and_save(const fs::path& folder, const World& w,
                        const models::ParameterSet& start = toy_parameters()) {
  sim::World world(w.ranks, tests::on_device());
  Gathered gathered;
  world.run([&](sim::RankContext& context) {
    const comm::FsdpMesh mesh(context, w.shards);
    FullySharded sharded({}, start, mesh, w.policy);
    const auto optimizer = make_adamw({});
    MovingAverage average(0.5);
    for (int step = 0; step < 2; ++step) {
      optimizer->step(sharded.trained(), 0.1);
      average.update(sharded.trained());
    }
    CheckpointInfo info;
    info.model = w.model;
    info.step = 2;
    save_training(folder, info, {sharded, *optimizer, w.average ? &average : nullptr}, mesh);
    const models::ParameterSet whole = sharded.gather_all();
    if (context.rank() != 0) return;
    for (const auto& spec : whole.specs()) gathered.parameters[spec.name] = whole[spec.name];
    gathered.averages = average.averages();
  });
  return gathered;
}

void check_file(const fs::path& file, const Values& expected) {
  const SafetensorsFile saved = SafetensorsFile::open(file);
  CHECK(saved.metadata() == std::map<std::string, std::string>{{"format", "pt"}});
  CHECK(saved.entries().size() == expected.size());
  for (const auto& [name, values] : expected) {
    INFO(name);
    CHECK(same_bits(saved.tensor(name), values));
  }
}

std::string config_text(const fs::path& folder) {
  return read_json_file(folder / "config.json").raw().dump();
}

TEST_CASE("export: equals what gather_all gives, from any world", "[fsdp][export]") {
  for (const World& w : {World{1, 1}, {2, 2}, {3, 3}, {4, 2}, {4, 1}}) {
    INFO(w.ranks << " ranks, " << w.shards << " shards");
    const TempFolder folder;
    const Gathered gathered = train_and_save(folder / "step-2", w);
    const ExportReport report = export_model(folder / "step-2", folder / "new/model", {});
    check_file(folder / "new/model" / kWeights, gathered.parameters);
    CHECK(report.tensors == 4);
    CHECK(report.elements == 70 + 3 + 12 + 1);
    CHECK(report.step == 2);
    CHECK(!report.checked);
    CHECK(!fs::exists(folder / "new/model/config.json"));
    CHECK(!fs::exists(folder / "new/model.partial"));
  }
}

TEST_CASE("export: averages, dtypes, and the bytes of a plain save", "[fsdp][export]") {
  const TempFolder folder;
  const fs::path saved = folder / "step-2";
  Gathered gathered = train_and_save(saved, {});
  gathered.averages.at("b.scale") = gathered.averages.at("b.scale").squeeze(0);
  ExportOptions options;
  options.average = true;
  export_model(saved, folder / "ema", options);
  check_file(folder / "ema" / kWeights, gathered.averages);
  CHECK(!same_bits(gathered.averages.at("a.weight"), gathered.parameters.at("a.weight")));
  options.average = false;
  for (const auto dtype : {at::kDouble, at::kBFloat16, at::kHalf, at::kFloat}) {
    options.dtype = dtype;
    options.overwrite = true;
    export_model(saved, folder / "model", options);
    Values expected;
    for (const auto& [name, x] : gathered.parameters) expected[name] = x.to(dtype);
    check_file(folder / "model" / kWeights, expected);
    save_safetensors(folder / "plain", expected, {{"format", "pt"}});
    CHECK(read_bytes(folder / "plain") == read_bytes(folder / "model" / kWeights));
  }
}

TEST_CASE("export: a value that the dtype cannot hold", "[fsdp][export]") {
  const TempFolder folder;
  models::ParameterSet large = toy_parameters();
  large["a.bias"].fill_(1e5);
  train_and_save(folder / "step-2", {}, large);
  ExportOptions options;
  options.dtype = at::kHalf;
  const std::string text =
      error_text([&] { export_model(folder / "step-2", folder / "model", options); });
  CHECK(contains(text, "\"a.bias\" holds values that F16 cannot hold"));
  CHECK(folder.file_count() == 1);
}

// What an error must say, and that nothing was made.
void check_refused(const TempFolder& folder, const ExportOptions& options,
                   const std::vector<std::string>& parts) {
  const size_t before = folder.file_count();
  const std::string text =
      error_text([&] { export_model(folder / "step-2", folder / "model", options); });
  INFO(text);
  for (const std::string& part : parts) CHECK(contains(text, part));
  CHECK(folder.file_count() == before);
}

TEST_CASE("export: a checkpoint that is damaged or is none", "[fsdp][export]") {
  const TempFolder folder;
  check_refused(folder, {}, {"there is no checkpoint", "step-2"});
  train_and_save(folder / "step-2", {3, 3});
  const fs::path file = folder / "step-2/rank00001.safetensors";
  const std::string bytes = read_bytes(file);

  std::string flipped = bytes;
  flipped.back() ^= 1;
  write_bytes(file, flipped);
  check_refused(folder, {}, {"rank00001.safetensors is damaged", "checksum"});
  write_bytes(file, std::string_view(bytes).substr(0, bytes.size() - 1));
  check_refused(folder, {}, {"rank00001.safetensors"});
  fs::remove(file);
  check_refused(folder, {}, {"rank00001.safetensors", "No such file"});
  write_bytes(file, bytes);

  fs::remove(folder / "step-2/manifest.json");
  check_refused(folder, {}, {"is no complete checkpoint: it has no manifest.json"});
}

TEST_CASE("export: what the checkpoint does not hold", "[fsdp][export]") {
  const TempFolder folder;
  World w;
  w.average = false;
  train_and_save(folder / "step-2", w);
  ExportOptions options;
  options.average = true;
  check_refused(folder, options, {"holds no averages", "without --ema"});
  fs::remove_all(folder / "step-2");
  tests::save_state(folder / "step-2", {{"a:exp_avg", at::ones({3})}}, 1);
  check_refused(folder, {}, {"holds no parameters"});
}

TEST_CASE("export: an older export is replaced as a whole, other folders are not",
          "[fsdp][export]") {
  const TempFolder folder;
  const Gathered gathered = train_and_save(folder / "step-2", {2, 2});
  fs::create_directory(folder / "model");
  check_refused(folder, {}, {"model is there already", "--overwrite"});
  ExportOptions options;
  options.overwrite = true;
  write_bytes(folder / "model/notes.txt", "mine");
  check_refused(folder, options, {"it holds \"notes.txt\", which is no part of an export"});
  CHECK(read_bytes(folder / "model/notes.txt") == "mine");
  fs::remove(folder / "model/notes.txt");

  write_bytes(folder / "model/config.json", "of another model");
  write_bytes(folder / "model" / kWeights, "of another model");
  export_model(folder / "step-2", folder.path() / "model/", options);
  check_file(folder / "model" / kWeights, gathered.parameters);
  CHECK(!fs::exists(folder / "model/config.json"));
  CHECK(folder.file_count() == 2);

  // One that fails leaves the older one.
  write_bytes(folder / "step-2/rank00000.safetensors", "");
  check_refused(folder, options, {"rank00000.safetensors"});
  check_file(folder / "model" / kWeights, gathered.parameters);

  options.overwrite = true;
  const std::string itself =
      error_text([&] { export_model(folder / "step-2", folder / "step-2", options); });
  CHECK(contains(itself, "no part of an export"));
}

TEST_CASE("export: buffers and frozen parameters come from the base model", "[fsdp][export]") {
  const TempFolder folder;
  const models::LoadedModel base = models::load_model(kModel);
  models::ParameterSet start(base.parameters.specs());
  for (const auto& spec : start.specs()) start.set(spec.name, base.parameters[spec.name].clone());
  start.freeze([](const std::string& name) { return name == "proj_out.bias"; });
  World w{3, 3, Policy::uniform(at::kDouble)};
  const Gathered gathered = train_and_save(folder / "step-2", w, start);

  ExportOptions options;
  options.config = kModel;
  check_refused(
      folder, options,
      {"does not hold 2 of the model's", "pos_embed.pos_embed", "proj_out.bias", "--base FOLDER"});
  options.config.clear();
  options.base = kModel;
  options.dtype = at::kDouble;
  const ExportReport report = export_model(folder / "step-2", folder / "model", options);
  CHECK(report.from_base == 2);
  CHECK(report.checked);
  check_file(folder / "model" / kWeights, gathered.parameters);
  // Loads as the model, with the same configuration.
  const models::LoadedModel loaded = models::load_model(folder / "model");
  CHECK(loaded.parameters.specs().size() == start.specs().size());
  CHECK(config_text(folder / "model") == config_text(kModel));

  options.base = fs::path(SHARDPROOF_SOURCE_DIR) / "datasets/goldens/flux_dev";
  options.overwrite = true;
  check_refused(folder, options, {"is of another model than the configuration"});
}

TEST_CASE("export: the configuration that the manifest holds", "[fsdp][export]") {
  const TempFolder folder;
  const fs::path flux = fs::path(SHARDPROOF_SOURCE_DIR) / "datasets/goldens/flux_dev";
  const models::LoadedModel model = models::load_model(flux);
  const JsonValue config = read_json_file(flux / "config.json");
  World w{2, 2};
  w.model = config.raw().dump();
  const Gathered gathered = train_and_save(folder / "step-2", w, model.parameters);
  CHECK(export_model(folder / "step-2", folder / "model", {}).checked);
  check_file(folder / "model" / kWeights, gathered.parameters);
  CHECK(config_text(folder / "model") == config.raw().dump());
}

TEST_CASE("export: low-rank adapters become a peft folder", "[fsdp][export]") {
  const TempFolder folder;
  const models::LoadedModel base = models::load_model(kModel);
  models::ParameterSet start = base.parameters;
  // A scale of which rank times scale is not alpha to the bit: 1/49.
  models::add_lora(start, {49, 1, {"to_q", "to_out.0"}}, 3);
  const Gathered gathered = train_and_save(folder / "step-2", {3, 3}, start);
  const ExportReport report = export_model(folder / "step-2", folder / "lora", {});
  CHECK(report.adapters);
  models::ParameterSet loaded = base.parameters;
  const models::LoraConfig config = models::load_lora(folder / "lora", loaded);
  CHECK(config.rank == 49);
  CHECK(config.alpha == 1);
  int64_t adapters = 0;
  for (const auto& spec : loaded.specs()) {
    if (!models::is_adapter(spec.name)) continue;
    INFO(spec.name);
    CHECK(same_bits(loaded[spec.name], gathered.parameters.at(spec.name)));
    ++adapters;
  }
  CHECK(adapters == 16);
  CHECK(report.tensors == adapters);
}

TEST_CASE("export: adapters that mean nothing are refused", "[fsdp][export]") {
  const TempFolder folder;
  std::vector<tests::WholeTensor> state = {{"a.lora_A.weight:param", at::ones({2, 3})},
                                           {"a.lora_B.weight:param", at::ones({4, 2})}};
  tests::save_state(folder / "step-2", state, 2);
  check_refused(folder, {}, {"does not say their scale", "adapter_scale"});
  fs::remove_all(folder / "step-2");
  state.push_back({"a.bias:param", at::ones({4})});
  tests::save_state(folder / "step-2", state, 2);
  check_refused(folder, {}, {"adapters and other parameters", "a.bias"});
}

}  // namespace
}  // namespace shardproof::fsdp
