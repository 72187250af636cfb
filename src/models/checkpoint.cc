#include "models/checkpoint.h"

#include <ATen/ATen.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <thread>

#include "base/atomic_file.h"
#include "base/error.h"
#include "io/safetensors.h"

namespace shardproof::models {
namespace {

namespace fs = std::filesystem;
using Problems = std::vector<std::string>;

constexpr const char* kConfig = "config.json";
constexpr const char* kPlain = "model.safetensors";
constexpr const char* kSingle = "diffusion_pytorch_model.safetensors";
constexpr const char* kIndex = "diffusion_pytorch_model.safetensors.index.json";
constexpr const char* kForms[] = {kPlain, kSingle, kIndex};

bool is_floating(std::string_view dtype) {
  return dtype == "F64" || dtype == "F32" || dtype == "F16" || dtype == "BF16";
}

// A list below its heading; problems of several lines are indented as a whole.
std::string to_list(const Problems& problems) {
  constexpr size_t kShown = 50;
  std::string text;
  for (size_t i = 0; i < problems.size() && i < kShown; ++i) {
    text += "\n  - ";
    for (const char c : problems[i]) text += c == '\n' ? "\n  " : std::string(1, c);
  }
  if (problems.size() > kShown) text += fmt::format("\n  and {} more", problems.size() - kShown);
  return text;
}

// What an action reports as an Error becomes one problem among others.
template <class Action>
bool attempt(Problems& problems, const Action& action) {
  try {
    action();
    return true;
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kBadInput) throw;
    problems.emplace_back(error.what());
    return false;
  }
}

bool is_plain_name(std::string_view file) {
  constexpr std::string_view kNotInNames("/\0", 2);
  return !file.empty() && file != "." && file != ".." &&
         file.find_first_of(kNotInNames) == std::string_view::npos;
}

// The files that hold a model's weights.
struct Weights {
  std::vector<std::string> files;          // sorted names of files that are there
  std::map<std::string, std::string> map;  // the index: tensor -> file, those missing among them
  std::set<std::string> unreadable;        // of the files in `map`; later also of `files`
  bool is_known = false;                   // else nothing can be said of single tensors
};

Weights read_index(const fs::path& folder, Problems& problems) {
  Weights weights;
  std::set<std::string> files;
  const JsonValue index = read_json_file(folder / kIndex);
  for (const auto& [tensor, value] : index.at("weight_map").members()) {
    std::string file;
    const JsonValue& name = value;  // (structured bindings cannot be captured)
    if (!attempt(problems, [&] { file = name.as_string(); })) continue;
    weights.map[tensor] = file;
    if (!files.insert(file).second) continue;
    if (!is_plain_name(file)) {
      problems.push_back(fmt::format("{} names the file {}; expected a name in the same folder",
                                     kIndex, json_quoted(file)));
      weights.unreadable.insert(file);
    } else if (std::error_code ignored; !fs::exists(folder / file, ignored)) {
      problems.push_back(fmt::format("{} names {}, which is missing", kIndex, json_quoted(file)));
      weights.unreadable.insert(file);
    } else {
      weights.files.push_back(file);
    }
  }
  std::sort(weights.files.begin(), weights.files.end());
  weights.is_known = true;
  return weights;
}

Weights find_weights(const fs::path& folder, Problems& problems) {
  std::vector<std::string> there;
  for (const char* name : kForms) {
    if (fs::exists(folder / name)) there.emplace_back(name);
  }
  Weights weights;
  if (there.empty()) {
    problems.push_back(fmt::format("no weights: expected {}", fmt::join(kForms, " or ")));
  } else if (there.size() > 1) {
    problems.push_back(
        fmt::format("several weights: {}; remove those that are out of date (an index with its "
                    "shards)",
                    fmt::join(there, ", ")));
  } else if (there[0] == kIndex) {
    attempt(problems, [&] { weights = read_index(folder, problems); });
  } else {
    weights.files = there;
    weights.is_known = true;
  }
  return weights;
}

struct FoundTensor {
  std::string name, dtype;
  std::vector<int64_t> shape;
  at::Tensor tensor;  // undefined where dtype is not floating
};

struct FileContent {
  std::vector<FoundTensor> tensors;
  Problems problems;
  std::exception_ptr failure;  // nothing about the file: out of memory, the caller's progress
};

// Opens the files by several threads. Results are by file, so that nothing of them depends on which
// thread was first.
class FileReader {
 public:
  FileReader(const fs::path& folder, const std::vector<std::string>& files,
             const ParameterSet* parameters, const LoadProgress& progress)
      : folder_(folder), files_(files), parameters_(parameters), progress_(progress) {}

  std::vector<FileContent> read() {
    contents_.resize(files_.size());
    const size_t most = std::max(1u, std::thread::hardware_concurrency());
    {
      std::vector<std::jthread> helpers;  // joined at the end of the block
      for (size_t i = 1; i < std::min(most, files_.size()); ++i) {
        helpers.emplace_back([this] { work(); });
      }
      work();
    }
    for (const FileContent& content : contents_) {
      if (content.failure) std::rethrow_exception(content.failure);
    }
    return std::move(contents_);
  }

 private:
  void work() {
    for (size_t i = next_++; i < files_.size() && !stop_; i = next_++) {
      try {
        attempt(contents_[i].problems, [&] { take(i); });
      } catch (...) {
        contents_[i].failure = std::current_exception();
        stop_ = true;
      }
    }
  }

  void take(size_t i) {
    const auto file = SafetensorsFile::open(folder_ / files_[i]);
    for (const SafetensorsEntry& entry : file.entries()) {
      FoundTensor found{entry.name, entry.dtype, entry.shape, {}};
      if (is_floating(entry.dtype)) found.tensor = file.tensor(entry.name, Alignment::kElement);
      contents_[i].tensors.push_back(std::move(found));
      if (progress_ && parameters_ && parameters_->contains(entry.name)) report(entry.name);
    }
  }

  void report(const std::string& name) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stop_ || !reported_.insert(name).second) return;
    progress_(static_cast<int64_t>(reported_.size()),
              static_cast<int64_t>(parameters_->specs().size()));
  }

  const fs::path& folder_;
  const std::vector<std::string>& files_;
  const ParameterSet* parameters_;  // null: the configuration is bad
  const LoadProgress& progress_;
  std::vector<FileContent> contents_;
  std::atomic<size_t> next_ = 0;
  std::atomic<bool> stop_ = false;
  std::mutex mutex_;
  std::set<std::string> reported_;
};

// Puts one file's tensors into the set.
void adopt(const FileContent& content, const std::string& file, ParameterSet& parameters,
           std::map<std::string, std::string>& holders, Problems& problems) {
  for (const FoundTensor& found : content.tensors) {
    const auto problem = [&](std::string_view text) {
      problems.push_back(fmt::format("{}: tensor {}: {}", file, json_quoted(found.name), text));
    };
    const auto [holder, is_first] = holders.emplace(found.name, file);
    if (!is_first) problem(fmt::format("is also in {}", holder->second));
    if (!parameters.contains(found.name)) {
      problem("not a tensor of this model");
      continue;
    }
    const std::vector<int64_t>& shape = parameters.spec(found.name).shape;
    if (found.shape != shape) {
      problem(fmt::format("expected shape [{}], found [{}]", fmt::join(shape, ","),
                          fmt::join(found.shape, ",")));
    }
    if (!found.tensor.defined()) {
      problem(fmt::format("expected dtype F64, F32, F16 or BF16, found {}", found.dtype));
    }
    if (found.tensor.defined() && found.shape == shape) parameters.set(found.name, found.tensor);
  }
}

// What the index says and the files do not hold.
void compare_with_index(const Weights& weights, const std::vector<FileContent>& contents,
                        Problems& problems) {
  std::map<std::string, std::set<std::string>> held;
  for (size_t i = 0; i < contents.size(); ++i) {
    for (const FoundTensor& found : contents[i].tensors) held[weights.files[i]].insert(found.name);
  }
  for (const auto& [tensor, file] : weights.map) {
    if (weights.unreadable.contains(file) || held[file].contains(tensor)) continue;
    problems.push_back(fmt::format("{} says that {} holds tensor {}, which is not there", kIndex,
                                   file, json_quoted(tensor)));
  }
}

// Tensors of the model that nobody holds. Those of a file that could not be read are left out: it
// is a problem of its own, and they would bury the others.
void list_missing(const Weights& weights, const std::map<std::string, std::string>& holders,
                  const ParameterSet& parameters, Problems& problems) {
  if (weights.map.empty() && !weights.unreadable.empty()) return;
  for (const ParameterSpec& spec : parameters.specs()) {
    if (holders.contains(spec.name)) continue;
    const auto in_index = weights.map.find(spec.name);
    if (in_index == weights.map.end()) {
      problems.push_back(fmt::format("tensor {} is missing", json_quoted(spec.name)));
    }  // else reported: its file is unreadable, or does not hold it
  }
}

template <class Action>
auto with_system_errors(const Action& action) {
  try {
    return action();
  } catch (const fs::filesystem_error& error) {
    bad_input("{}. Check the path and its permissions", error.what());
  }
}

LoadedModel load(const fs::path& folder, const LoadProgress& progress) {
  if (!fs::is_directory(folder)) bad_input("no model folder {}", folder.string());
  Problems problems;
  std::unique_ptr<Transformer> model;
  attempt(problems, [&] { model = make_transformer(read_json_file(folder / kConfig)); });
  ParameterSet parameters(model ? model->parameter_specs() : std::vector<ParameterSpec>{});
  Weights weights = find_weights(folder, problems);
  const std::vector<FileContent> contents =
      FileReader(folder, weights.files, model ? &parameters : nullptr, progress).read();
  std::map<std::string, std::string> holders;
  for (size_t i = 0; i < contents.size(); ++i) {
    const std::string& file = weights.files[i];
    if (!contents[i].problems.empty()) weights.unreadable.insert(file);
    problems.insert(problems.end(), contents[i].problems.begin(), contents[i].problems.end());
    if (model) adopt(contents[i], file, parameters, holders, problems);
  }
  compare_with_index(weights, contents, problems);
  if (model && weights.is_known) list_missing(weights, holders, parameters, problems);
  if (!problems.empty()) {
    bad_input("model folder {} cannot be loaded{}, {} problem{}:{}", folder.string(),
              model ? " as " + model->class_name() : "", problems.size(),
              problems.size() == 1 ? "" : "s", to_list(problems));
  }
  return {std::move(model), std::move(parameters)};
}

using Shard = std::map<std::string, at::Tensor>;

// In the model's order, so that what is used together lies together.
std::vector<Shard> to_shards(const ParameterSet& parameters, int64_t shard_bytes) {
  std::vector<Shard> shards(1);
  int64_t bytes = 0;
  for (const ParameterSpec& spec : parameters.specs()) {
    const at::Tensor tensor = parameters[spec.name].detach();
    const auto size = static_cast<int64_t>(tensor.nbytes());
    if (!shards.back().empty() && bytes + size > shard_bytes) {
      shards.emplace_back();
      bytes = 0;
    }
    shards.back()[spec.name] = tensor;
    bytes += size;
  }
  return shards;
}

std::string shard_name(size_t i, size_t count) {
  if (count == 1) return kSingle;
  return fmt::format("diffusion_pytorch_model-{:05}-of-{:05}.safetensors", i + 1, count);
}

std::string index_text(const std::vector<Shard>& shards) {
  int64_t total = 0;
  nlohmann::json map = nlohmann::json::object();
  for (size_t i = 0; i < shards.size(); ++i) {
    for (const auto& [name, tensor] : shards[i]) {
      map[name] = shard_name(i, shards.size());
      total += static_cast<int64_t>(tensor.nbytes());
    }
  }
  const nlohmann::json index = {{"metadata", {{"total_size", total}}}, {"weight_map", map}};
  return index.dump(2) + "\n";
}

// A saved folder must load.
void require_model(const fs::path& folder, const JsonValue& config,
                   const ParameterSet& parameters) {
  const ParameterSet model(make_transformer(config)->parameter_specs());
  Problems problems;
  for (const ParameterSpec& spec : model.specs()) {
    if (!parameters.contains(spec.name)) {
      problems.push_back(fmt::format("tensor {} is missing", json_quoted(spec.name)));
    }
  }
  for (const ParameterSpec& spec : parameters.specs()) {
    const std::string name = json_quoted(spec.name);
    const at::Tensor& tensor = parameters[spec.name];
    if (!model.contains(spec.name)) {
      problems.push_back(fmt::format("tensor {} is not of this model", name));
    } else if (tensor.sizes() != model.spec(spec.name).shape) {
      problems.push_back(fmt::format("tensor {}: expected shape [{}], found [{}]", name,
                                     fmt::join(model.spec(spec.name).shape, ","),
                                     fmt::join(tensor.sizes(), ",")));
    }
    if (!at::isFloatingType(tensor.scalar_type()) || at::isFloat8Type(tensor.scalar_type())) {
      problems.push_back(
          fmt::format("tensor {}: expected Double, Float, Half or BFloat16, found {}", name,
                      c10::toString(tensor.scalar_type())));
    }
  }
  if (problems.empty()) return;
  bad_input("cannot save a model in {}, {} problem{}:{}", folder.string(), problems.size(),
            problems.size() == 1 ? "" : "s", to_list(problems));
}

// A new folder that is removed with all that is in it.
class StagingFolder {
 public:
  explicit StagingFolder(const fs::path& parent) {
    for (int n = 0; path_.empty() || !fs::create_directory(path_); ++n) {
      path_ = parent / fmt::format(".shardproof-{}-{}.save", ::getpid(), n);
    }
  }
  ~StagingFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  StagingFolder(const StagingFolder&) = delete;
  StagingFolder& operator=(const StagingFolder&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

// Renames are durable once the folder is; a folder that cannot be flushed still has its files.
void flush_folder(const fs::path& folder) {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return;
  ::fsync(descriptor);
  ::close(descriptor);
}

// First what a reader looks for, so that a crash within leaves no model rather than a mixture.
void remove_old_weights(const fs::path& folder) {
  for (const char* name : kForms) fs::remove(folder / name);
  flush_folder(folder);
  static const std::regex kShard(R"(diffusion_pytorch_model-\d{5,}-of-\d{5,}\.safetensors)");
  std::vector<fs::path> old;  // a listing need not show what changes meanwhile
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    if (std::regex_match(entry.path().filename().string(), kShard)) old.push_back(entry.path());
  }
  for (const fs::path& file : old) fs::remove(file);
}

void save(const fs::path& folder, const JsonValue& config, const ParameterSet& parameters,
          int64_t shard_bytes) {
  require_model(folder, config, parameters);
  const std::vector<Shard> shards = to_shards(parameters, shard_bytes);
  std::vector<std::string> names = {kConfig};  // in the order in which they are put there
  fs::create_directories(folder);
  const StagingFolder staging(folder);
  write_file_atomically(staging.path() / kConfig, config.raw().dump(2) + "\n");
  for (size_t i = 0; i < shards.size(); ++i) {
    names.push_back(shard_name(i, shards.size()));
    save_safetensors(staging.path() / names.back(), shards[i], {{"format", "pt"}});
  }
  if (shards.size() > 1) {
    names.emplace_back(kIndex);
    write_file_atomically(staging.path() / kIndex, index_text(shards));
  }
  remove_old_weights(folder);
  for (const std::string& name : names) {
    if (name == names.back()) flush_folder(folder);
    fs::rename(staging.path() / name, folder / name);
  }
  flush_folder(folder);
}

}  // namespace

LoadedModel load_model(const fs::path& folder, const LoadProgress& progress) {
  return with_system_errors([&] { return load(folder, progress); });
}

void save_model(const fs::path& folder, const JsonValue& config, const ParameterSet& parameters,
                int64_t shard_bytes) {
  with_system_errors([&] { save(folder, config, parameters, shard_bytes); });
}

}  // namespace shardproof::models
