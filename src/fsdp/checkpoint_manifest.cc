#include "fsdp/checkpoint_manifest.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <tuple>

#include "base/error.h"
#include "base/json_file.h"
#include "fsdp/staging_folder.h"

namespace shardproof::fsdp {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kFormat = "shardproof-checkpoint";
constexpr int64_t kVersion = 1;
constexpr size_t kLargestManifest = size_t{2} << 30;   // bytes; grows with tensors times ranks
constexpr uint64_t kLargestExact = uint64_t{1} << 53;  // that a double, and so any JSON, can hold

std::string seed_text(uint64_t seed) {
  return seed > kLargestExact ? fmt::format("\"{}\"", seed) : fmt::format("{}", seed);
}

uint64_t parse_unsigned(const JsonValue& value, int base) {
  const std::string text = value.as_string();
  uint64_t number = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number, base);
  if (error != std::errc() || stop != end || text.empty()) {
    value.fail(fmt::format("expected a number of at most 64 bits, base {}, found {}", base,
                           json_quoted(text)));
  }
  return number;
}

uint64_t read_seed(const JsonValue& value) {
  if (value.is_string()) return parse_unsigned(value, 10);
  const int64_t seed = value.as_integer();
  if (seed < 0) value.fail("expected a seed of at least 0");
  return static_cast<uint64_t>(seed);
}

CheckpointInfo read_info(const JsonValue& root) {
  CheckpointInfo info;
  info.model = root.at("model").as_string();
  info.mesh = root.at("mesh").as_string();
  info.plan = root.at("plan").as_string();
  info.commit = root.at("commit").as_string();
  info.seed = read_seed(root.at("seed"));
  info.step = root.at("step").as_integer();
  for (const auto& [name, value] : root.at("numbers").members()) {
    info.numbers[name] = value.as_number();
  }
  return info;
}

// Names are not free: one that led out of the folder would be somebody else's file.
std::vector<FileRecord> read_files(const JsonValue& root) {
  std::vector<FileRecord> files;
  for (const JsonValue& value : root.at("files").elements()) {
    const std::string expected = rank_file_name(static_cast<int>(files.size()));
    const JsonValue name = value.at("name");
    if (name.as_string() != expected) {
      name.fail(fmt::format("expected \"{}\", found {}", expected, json_quoted(name.as_string())));
    }
    const int64_t bytes = value.at("bytes").as_integer();
    if (bytes < 0) value.at("bytes").fail("expected a size of at least 0");
    files.push_back({static_cast<uint64_t>(bytes), parse_unsigned(value.at("checksum"), 16)});
  }
  const JsonValue world = root.at("world");
  if (world.as_integer() != static_cast<int64_t>(files.size())) {
    world.fail(fmt::format("{} ranks, but {} files", world.as_integer(), files.size()));
  }
  return files;
}

TensorRecord read_tensor(const JsonValue& value, size_t files) {
  TensorRecord tensor;
  tensor.dtype = value.at("dtype").as_string();
  tensor.shape = value.at("shape").as_integers();
  for (const JsonValue& part : value.at("rows").elements()) {
    const std::vector<int64_t> numbers = part.as_integers();
    if (numbers.size() != 3) part.fail("expected [file, first row, row after the last]");
    if (numbers[0] < 0 || numbers[0] >= static_cast<int64_t>(files)) {
      part.fail(fmt::format("no file {}: there are {}", numbers[0], files));
    }
    tensor.parts.push_back({static_cast<int>(numbers[0]), {numbers[1], numbers[2]}});
  }
  return tensor;
}

void require_each_row_once(const std::string& name, TensorRecord& tensor) {
  std::sort(tensor.parts.begin(), tensor.parts.end(), [](const auto& a, const auto& b) {
    return std::tie(a.rows.begin, a.rows.end, a.file) < std::tie(b.rows.begin, b.rows.end, b.file);
  });
  int64_t next = 0;
  int last_file = -1;
  const auto require_written = [&](int64_t begin) {
    if (begin <= next) return;
    bad_input("tensor {}: no rank writes its rows {} to {} (of {})", json_quoted(name), next,
              begin - 1, tensor.rows());
  };
  for (const StoredRows& part : tensor.parts) {
    require_written(part.rows.begin);
    if (part.rows.begin < next) {
      bad_input("tensor {}: ranks {} and {} both write its row {}", json_quoted(name), last_file,
                part.file, part.rows.begin);
    }
    if (part.rows.size() <= 0 || part.rows.end > tensor.rows()) {
      bad_input("tensor {}: rank {} writes rows {} up to, not including, {} of {}",
                json_quoted(name), part.file, part.rows.begin, part.rows.end, tensor.rows());
    }
    next = part.rows.end;
    last_file = part.file;
  }
  require_written(tensor.rows());
}

[[noreturn]] void refuse_without_manifest(const fs::path& folder) {
  std::error_code ignored;
  const fs::path partial = partial_folder(folder);
  if (fs::exists(folder, ignored)) {
    bad_input("{} is no complete checkpoint: it has no {}; load another one", folder.string(),
              kManifestName);
  }
  if (fs::exists(partial, ignored)) {
    bad_input("there is no checkpoint {}, but {}: its save was broken off. Load an older one",
              folder.string(), partial.filename().string());
  }
  bad_input("there is no checkpoint {}, and no save of it was broken off; check the path",
            folder.string());
}

}  // namespace

std::string rank_file_name(int rank) { return fmt::format("rank{:05}.safetensors", rank); }

void require_each_row_once(Manifest& manifest) {
  for (auto& [name, tensor] : manifest.tensors) require_each_row_once(name, tensor);
}

std::string manifest_text(const Manifest& manifest) {
  const CheckpointInfo& info = manifest.info;
  for (const auto& [name, value] : info.numbers) {
    if (!std::isfinite(value)) bad_input("{} is {}; a manifest holds finite numbers", name, value);
  }
  std::vector<std::string> files, tensors;
  for (const FileRecord& file : manifest.files) {
    files.push_back(fmt::format(R"(  {{"name": "{}", "bytes": {}, "checksum": "{:016x}"}})",
                                rank_file_name(static_cast<int>(files.size())), file.bytes,
                                file.checksum));
  }
  for (const auto& [name, tensor] : manifest.tensors) {
    std::vector<std::string> parts;
    for (const StoredRows& part : tensor.parts) {
      parts.push_back(fmt::format("[{}, {}, {}]", part.file, part.rows.begin, part.rows.end));
    }
    tensors.push_back(fmt::format(R"(  {}: {{"dtype": "{}", "shape": [{}], "rows": [{}]}})",
                                  json(name).dump(), tensor.dtype, fmt::join(tensor.shape, ", "),
                                  fmt::join(parts, ", ")));
  }
  std::string text =
      fmt::format("{{\n \"format\": \"{}\",\n \"version\": {},\n", kFormat, kVersion);
  for (const auto& [key, value] :
       {std::pair("model", info.model), std::pair("mesh", info.mesh), std::pair("plan", info.plan),
        std::pair("commit", info.commit)}) {
    text += fmt::format(" \"{}\": {},\n", key, json(value).dump());
  }
  return text + fmt::format(
                    " \"seed\": {},\n \"step\": {},\n \"numbers\": {},\n \"world\": {},\n"
                    " \"files\": [\n{}\n ],\n \"tensors\": {{\n{}\n }}\n}}\n",
                    seed_text(info.seed), info.step, json(info.numbers).dump(),
                    manifest.files.size(), fmt::join(files, ",\n"), fmt::join(tensors, ",\n"));
}

Manifest read_manifest(const fs::path& folder) {
  const fs::path file = folder / kManifestName;
  std::error_code ignored;
  if (!fs::exists(file, ignored)) refuse_without_manifest(folder);
  const JsonValue root = read_json_file(file, kLargestManifest);
  const JsonValue format = root.at("format"), version = root.at("version");
  if (format.as_string() != kFormat) {
    format.fail(fmt::format("expected \"{}\", found {}", kFormat, json_quoted(format.as_string())));
  }
  if (version.as_integer() != kVersion) {
    version.fail(
        fmt::format("this program reads version {}, found {}", kVersion, version.as_integer()));
  }
  Manifest manifest;
  manifest.info = read_info(root);
  manifest.files = read_files(root);
  for (const auto& [name, value] : root.at("tensors").members()) {
    manifest.tensors[name] = read_tensor(value, manifest.files.size());
  }
  try {
    require_each_row_once(manifest);
  } catch (const Error& error) {
    root.fail(error.what());
  }
  return manifest;
}

}  // namespace shardproof::fsdp
