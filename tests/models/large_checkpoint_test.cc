// A checkpoint of QwenImage's size, 41 GB, in sparse files: loading must not read or copy it.
#include <ATen/ATen.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <nlohmann/json.hpp>

#include "models/checkpoint.h"
#include "tests/file_support.h"
#include "tests/models/checkpoint_support.h"

namespace shardproof::models {
namespace {

using tests::TempFolder;
using tests::write_bytes;

constexpr int64_t kMostGrowth = int64_t{300} << 20;
constexpr int64_t kShardBytes = 10'000'000'000;
constexpr char kConfig[] = R"({"_class_name": "QwenImageTransformer2DModel"})";

// "VmRSS" (now) or "VmHWM" (the peak) of this process in bytes.
int64_t memory(const std::string& field) {
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line)) {
    if (line.starts_with(field + ":")) return std::stoll(line.substr(field.size() + 1)) * 1024;
  }
  FAIL("no " << field << " in /proc/self/status");
  return 0;
}

// So that the peak is of what follows, not of tests before.
void reset_peak() { std::ofstream("/proc/self/clear_refs") << "5"; }

int64_t bytes_on_disk(const std::filesystem::path& file) {
  struct stat status {};
  REQUIRE(::stat(file.c_str(), &status) == 0);
  return int64_t{status.st_blocks} * 512;
}

// Writes `head`, then zeros up to `size` that take no space, but for `tail` at their end. False
// where the file system has no files of this size.
bool write_sparse(const std::filesystem::path& file, const std::string& head, int64_t size,
                  const std::string& tail) {
  write_bytes(file, head);
  if (::truncate(file.c_str(), size) != 0) {
    REQUIRE(errno == EFBIG);
    return false;
  }
  const int descriptor = ::open(file.c_str(), O_WRONLY | O_CLOEXEC);
  REQUIRE(descriptor >= 0);
  const auto at = size - static_cast<int64_t>(tail.size());
  CHECK(::pwrite(descriptor, tail.data(), tail.size(), at) == static_cast<ssize_t>(tail.size()));
  REQUIRE(::close(descriptor) == 0);
  return true;
}

bool has_sparse_files(const TempFolder& folder) {
  constexpr int64_t kSize = int64_t{64} << 20;
  const bool written = write_sparse(folder / "probe", "head", kSize, "tail");
  const bool sparse = written && bytes_on_disk(folder / "probe") < kSize / 2;
  std::filesystem::remove(folder / "probe");
  return sparse;
}

struct Shard {
  std::vector<ParameterSpec> specs;  // by name
  int64_t bytes = 0;
};

std::vector<Shard> to_shards(std::vector<ParameterSpec> specs) {
  std::sort(specs.begin(), specs.end(),
            [](const auto& a, const auto& b) { return a.name < b.name; });
  std::vector<Shard> shards(1);
  for (const ParameterSpec& spec : specs) {
    const int64_t bytes = 2 * c10::multiply_integers(spec.shape);
    if (shards.back().bytes + bytes > kShardBytes) shards.emplace_back();
    shards.back().specs.push_back(spec);
    shards.back().bytes += bytes;
  }
  return shards;
}

// As the reference writer's, with spaces up to a multiple of 8, and more so that the data begins
// off a 64-byte line: the worst case, and that of 7 files in 8.
std::string header(const Shard& shard) {
  std::string text = R"({"__metadata__":{"format":"pt"})";
  int64_t begin = 0;
  for (const ParameterSpec& spec : shard.specs) {
    const int64_t end = begin + 2 * c10::multiply_integers(spec.shape);
    text += fmt::format(R"(,"{}":{{"dtype":"BF16","shape":[{}],"data_offsets":[{},{}]}})",
                        spec.name, fmt::join(spec.shape, ","), begin, end);
    begin = end;
  }
  text += "}";
  while (text.size() % 64 != 0) text += ' ';  // the length before it makes 8 more
  const uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + text;
}

// False where the file system has no such files.
bool write_model(const TempFolder& folder, const std::vector<Shard>& shards) {
  constexpr char kOne[] = "\x80\x3f";  // 1 in BF16
  write_bytes(folder / "config.json", kConfig);
  nlohmann::json index;
  for (size_t i = 0; i < shards.size(); ++i) {
    const std::string name =
        fmt::format("diffusion_pytorch_model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
    const std::string head = header(shards[i]);
    const int64_t size = static_cast<int64_t>(head.size()) + shards[i].bytes;
    if (!write_sparse(folder / name, head, size, kOne)) return false;
    REQUIRE(bytes_on_disk(folder / name) < int64_t{8} << 20);
    for (const ParameterSpec& spec : shards[i].specs) index["weight_map"][spec.name] = name;
  }
  write_bytes(folder / "diffusion_pytorch_model.safetensors.index.json", index.dump());
  return true;
}

TEST_CASE("loading 41 GB takes megabytes of memory", "[checkpoint]") {
  const TempFolder folder;
  const auto model = make_transformer(parse_json(kConfig, "config"));
  const std::vector<Shard> shards = to_shards(model->parameter_specs());
  CHECK(shards.size() == 5);
  if (!has_sparse_files(folder) || !write_model(folder, shards)) {
    WARN("skipped: " << folder.path() << " has no sparse files of 10 GB; set TMPDIR");
    return;
  }
  reset_peak();
  const int64_t before = memory("VmRSS");
  // Ends early what would otherwise fill this machine's memory.
  const LoadedModel loaded = load_model(folder.path(), [&](int64_t done, int64_t all) {
    if (memory("VmRSS") - before < kMostGrowth) return;
    throw std::runtime_error(fmt::format("too much memory after {} of {} tensors", done, all));
  });
  const int64_t growth = memory("VmHWM") - before;
  CHECK(growth < kMostGrowth);
  int64_t bytes = 0;
  for (const ParameterSpec& spec : loaded.parameters.specs()) {
    const at::Tensor& tensor = loaded.parameters[spec.name];
    CHECK(tensor.scalar_type() == at::kBFloat16);
    bytes += static_cast<int64_t>(tensor.nbytes());
  }
  CHECK(bytes > 40'000'000'000);
  for (const Shard& shard : shards) {
    const at::Tensor last = loaded.parameters[shard.specs.back().name].flatten();
    CHECK(last[-1].item<float>() == 1);
    CHECK(last[0].item<float>() == 0);
  }
  UNSCOPED_INFO("growth of the peak: " << growth / 1024 << " KiB");
}

}  // namespace
}  // namespace shardproof::models
