#include "fsdp/export.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>

#include "base/atomic_file.h"
#include "base/error.h"
#include "base/json_file.h"
#include "fsdp/checkpoint_files.h"
#include "fsdp/checkpoint_manifest.h"
#include "fsdp/staging_folder.h"
#include "fsdp/training_state.h"
#include "io/safetensors.h"
#include "models/checkpoint.h"
#include "models/lora.h"

namespace shardproof::fsdp {
namespace {

namespace fs = std::filesystem;
using at::Tensor;
using Sources = std::map<std::string, SafetensorsSource>;

constexpr const char* kConfig = "config.json";
constexpr const char* kWeights = "diffusion_pytorch_model.safetensors";
constexpr std::array kOwnNames = {kConfig, kWeights, "adapter_config.json",
                                  "adapter_model.safetensors"};

// ---------------------------------------------------------------- what is there

// Replacing a folder removes all that is in it: it must be one that an export has made.
void require_free(const fs::path& folder, bool overwrite) {
  std::error_code error;
  if (!fs::exists(fs::symlink_status(folder, error))) return;
  if (!overwrite) {
    bad_input("{} is there already; export into another folder, or replace it with --overwrite",
              folder.string());
  }
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (std::find(kOwnNames.begin(), kOwnNames.end(), name) != kOwnNames.end()) continue;
    bad_input(
        "{} cannot be replaced: it holds {}, which is no part of an export; export into "
        "another folder",
        folder.string(), json_quoted(name));
  }
  if (error) bad_input("{} cannot be replaced: {}", folder.string(), error.message());
}

// A parameter (or its average) in the checkpoint.
struct Stored {
  std::string tensor;  // "<parameter>:param"
  const TensorRecord* record;
};
using Parameters = std::map<std::string, Stored>;

Parameters find_parameters(const Manifest& manifest, const fs::path& folder, bool average) {
  const std::string suffix = average ? ":ema" : ":param";
  Parameters found;
  for (const auto& [name, record] : manifest.tensors) {
    if (!name.ends_with(suffix)) continue;
    found[name.substr(0, name.size() - suffix.size())] = {name, &record};
  }
  if (!found.empty()) return found;
  if (average) {
    bad_input("{} holds no averages: the run kept none. Export without --ema", folder.string());
  }
  bad_input("{} holds no parameters (tensors named <parameter>:param)", folder.string());
}

// ---------------------------------------------------------------- the model

// What the parameters should be; without a configuration nothing is known.
struct Expected {
  std::optional<JsonValue> config;
  std::unique_ptr<models::Transformer> model;
  std::optional<models::ParameterSet> base;
};

std::optional<JsonValue> find_config(const Manifest& manifest, const ExportOptions& options) {
  fs::path file = options.base.empty() ? options.config : options.base;
  if (!file.empty()) return read_json_file(fs::is_directory(file) ? file / kConfig : file);
  const std::string& text = manifest.info.model;
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("_class_name")) return std::nullopt;
  return parse_json(text, fmt::format("model in {}", kManifestName));
}

Expected find_model(const Manifest& manifest, const ExportOptions& options) {
  Expected expected{find_config(manifest, options), nullptr, std::nullopt};
  if (!options.base.empty()) {
    models::LoadedModel base = models::load_model(options.base);
    expected.model = std::move(base.model);
    expected.base = std::move(base.parameters);
  } else if (expected.config) {
    expected.model = models::make_transformer(*expected.config);
  }
  return expected;
}

std::string list_of(const std::vector<std::string>& items) {
  constexpr size_t kShown = 10;
  const std::vector<std::string> shown(items.begin(),
                                       items.begin() + std::min(kShown, items.size()));
  return fmt::format("{}{}", fmt::join(shown, ", "), items.size() > kShown ? ", ..." : "");
}

// That the checkpoint's parameters are the model's, and what it lacks.
std::vector<std::string> compare(const Parameters& parameters, const models::ParameterSet& model,
                                 const fs::path& checkpoint) {
  std::vector<std::string> others, missing;
  for (const auto& [name, stored] : parameters) {
    if (!model.contains(name)) {
      others.push_back(json_quoted(name));
    } else if (model.spec(name).shape != stored.record->shape) {
      others.push_back(fmt::format("{} of shape [{}] instead of [{}]", json_quoted(name),
                                   fmt::join(stored.record->shape, ","),
                                   fmt::join(model.spec(name).shape, ",")));
    }
  }
  if (!others.empty()) {
    bad_input("{} is of another model than the configuration: it holds {}", checkpoint.string(),
              list_of(others));
  }
  for (const models::ParameterSpec& spec : model.specs()) {
    if (!parameters.contains(spec.name)) missing.push_back(spec.name);
  }
  return missing;
}

// ---------------------------------------------------------------- tensors

// A conversion must not turn a number into an infinity.
Tensor converted(const Tensor& x, at::ScalarType dtype, const std::string& name) {
  if (x.scalar_type() == dtype) return x;
  Tensor y = x.to(dtype);
  if (!at::equal(x.isfinite(), y.isfinite())) {
    bad_input("{} holds values that {} cannot hold; export it in another dtype", json_quoted(name),
              safetensors_dtype(dtype));
  }
  return y;
}

at::ScalarType written_dtype(at::ScalarType stored, const ExportOptions& options) {
  return options.dtype && at::isFloatingType(stored) ? *options.dtype : stored;
}

Tensor put_together(const std::string& name, const Stored& stored, at::ScalarType dtype,
                    CheckpointFiles& files) {
  const TensorRecord& record = *stored.record;
  const Tensor whole = at::empty(with_rows(record.shape, record.rows()), dtype);
  for (const StoredRows& part : record.parts) {
    const Tensor rows = files.rows(stored.tensor, record, part);
    whole.narrow(0, part.rows.begin, part.rows.size()).copy_(converted(rows, dtype, name));
  }
  return whole.view(record.shape);
}

Sources make_sources(const Parameters& parameters, const ExportOptions& options,
                     CheckpointFiles& files) {
  Sources sources;
  for (const auto& [name, stored] : parameters) {
    for (const StoredRows& part : stored.record->parts) files.open(part.file);
    const at::ScalarType dtype =
        written_dtype(safetensors_scalar_type(stored.record->dtype), options);
    sources[name] = {dtype, stored.record->shape, [&files, dtype, name = name, stored = stored] {
                       return put_together(name, stored, dtype, files);
                     }};
  }
  return sources;
}

void add_from_base(const std::vector<std::string>& names, const models::ParameterSet& base,
                   const ExportOptions& options, Sources& sources) {
  for (const std::string& name : names) {
    const Tensor tensor = base[name];
    const at::ScalarType dtype = written_dtype(tensor.scalar_type(), options);
    sources[name] = {dtype, tensor.sizes().vec(),
                     [tensor, dtype, name] { return converted(tensor, dtype, name); }};
  }
}

// ---------------------------------------------------------------- the two forms

// Returns how many tensors came from the base model.
int64_t complete(const Parameters& parameters, const Expected& expected, const fs::path& checkpoint,
                 const ExportOptions& options, Sources& sources) {
  if (!expected.model) return 0;
  const models::ParameterSet model(expected.model->parameter_specs());
  const std::vector<std::string> missing = compare(parameters, model, checkpoint);
  if (missing.empty()) return 0;
  if (!expected.base) {
    bad_input(
        "{} does not hold {} of the model's {} tensors: {}. Frozen parameters and buffers "
        "are not saved with a run; name the folder of the model that it started from: "
        "--base FOLDER",
        checkpoint.string(), missing.size(), model.specs().size(), list_of(missing));
  }
  add_from_base(missing, *expected.base, options, sources);
  return static_cast<int64_t>(missing.size());
}

double adapter_scale(const Manifest& manifest, const Parameters& parameters,
                     const fs::path& checkpoint) {
  for (const auto& [name, stored] : parameters) {
    if (models::is_adapter(name)) continue;
    bad_input(
        "{} holds low-rank adapters and other parameters, {} among them; peft's form has "
        "adapters alone",
        checkpoint.string(), json_quoted(name));
  }
  const auto scale = manifest.info.numbers.find(kAdapterScaleNumber);
  if (scale != manifest.info.numbers.end()) return scale->second;
  bad_input(
      "{} holds low-rank adapters, but its manifest does not say their scale (numbers.{}: "
      "alpha / rank), without which they mean nothing",
      checkpoint.string(), kAdapterScaleNumber);
}

}  // namespace

ExportReport export_model(const fs::path& checkpoint, const fs::path& folder,
                          const ExportOptions& options) {
  const at::NoGradGuard no_grad;
  SP_CHECK(options.base.empty() || options.config.empty(), "both a configuration and a base model");
  const fs::path target = plain_folder(folder);
  const Manifest manifest = read_manifest(checkpoint);
  require_free(target, options.overwrite);
  const Parameters parameters = find_parameters(manifest, checkpoint, options.average);
  CheckpointFiles files(checkpoint, manifest.files);
  Sources sources = make_sources(parameters, options, files);

  ExportReport report;
  report.step = manifest.info.step;
  report.adapters = std::any_of(parameters.begin(), parameters.end(), [](const auto& parameter) {
    return models::is_adapter(parameter.first);
  });
  StagingFolder staging(target, /*is_owner=*/true);
  if (report.adapters) {
    const double scale = adapter_scale(manifest, parameters, checkpoint);
    std::map<std::string, Tensor> adapters;
    for (const auto& [name, source] : sources) adapters[name] = source.make();
    staging.create(options.overwrite);
    models::save_lora_alone(staging.path(), adapters, scale);
  } else {
    const Expected expected = find_model(manifest, options);
    report.checked = expected.model != nullptr;
    report.from_base = complete(parameters, expected, checkpoint, options, sources);
    staging.create(options.overwrite);
    stream_safetensors(staging.path() / kWeights, sources, {{"format", "pt"}});
    if (expected.config) {
      write_file_atomically(staging.path() / kConfig, expected.config->raw().dump(2) + "\n");
    }
  }
  staging.publish();
  report.tensors = static_cast<int64_t>(sources.size());
  for (const auto& [name, source] : sources) {
    report.elements += c10::multiply_integers(source.shape);
  }
  return report;
}

}  // namespace shardproof::fsdp
