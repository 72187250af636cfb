#include "io/safetensors.h"

#include <ATen/ATen.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>

#include "base/atomic_file.h"
#include "base/error.h"
#include "base/json_file.h"

namespace shardproof {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little endian");

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kLargestHeader = 100'000'000;  // the reference implementation's limit
constexpr size_t kMostDimensions = 64;            // LibTorch's iterators take no more
constexpr uintptr_t kLineBytes = 64;
constexpr char kMetadataKey[] = "__metadata__";

struct Dtype {
  const char* name;
  int64_t bits;
  std::optional<at::ScalarType> type;  // absent: not read by this program
};

// In the order in which the reference writer lays out tensors.
constexpr Dtype kDtypes[] = {
    {"U64", 64, {}},       {"I64", 64, at::kLong},      {"F64", 64, at::kDouble},
    {"C64", 64, {}},       {"F32", 32, at::kFloat},     {"U32", 32, {}},
    {"I32", 32, at::kInt}, {"BF16", 16, at::kBFloat16}, {"F16", 16, at::kHalf},
    {"U16", 16, {}},       {"I16", 16, at::kShort},     {"F8_E8M0", 8, {}},
    {"F8_E4M3", 8, {}},    {"F8_E5M2", 8, {}},          {"I8", 8, at::kChar},
    {"U8", 8, at::kByte},  {"F6_E3M2", 6, {}},          {"F6_E2M3", 6, {}},
    {"F4", 4, {}},         {"BOOL", 8, at::kBool},
};
constexpr char kReadable[] = "F64 F32 F16 BF16 I64 I32 I16 I8 U8 BOOL";

const Dtype* find_dtype(std::string_view name) {
  const auto found = std::find_if(std::begin(kDtypes), std::end(kDtypes),
                                  [&](const Dtype& dtype) { return dtype.name == name; });
  return found == std::end(kDtypes) ? nullptr : found;
}

const Dtype* find_dtype(at::ScalarType type) {
  const auto found = std::find_if(std::begin(kDtypes), std::end(kDtypes),
                                  [&](const Dtype& dtype) { return dtype.type == type; });
  return found == std::end(kDtypes) ? nullptr : found;
}

struct Mapping {
  std::shared_ptr<char> bytes;
  uint64_t size;
};

Mapping map_open_file(int descriptor, const std::string& file) {
  struct stat status {};
  if (::fstat(descriptor, &status) != 0) {
    bad_input("cannot read {}: {}", file, std::strerror(errno));
  }
  if (!S_ISREG(status.st_mode))
    bad_input("{} is not a regular file; expected a .safetensors file", file);
  const auto size = static_cast<uint64_t>(status.st_size);
  if (size < kLengthBytes) {
    bad_input("{} has {} bytes, but a safetensors file has at least 8: truncated or another format",
              file, size);
  }
  // PROT_WRITE on a private mapping: an in-place operation on a tensor copies the page instead of
  // killing the process. MAP_NORESERVE: those copies are rare, so a file larger than memory may
  // map.
  void* start =
      ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, descriptor, 0);
  if (start == MAP_FAILED) bad_input("cannot map {} into memory: {}", file, std::strerror(errno));
  return {std::shared_ptr<char>(static_cast<char*>(start), [size](char* p) { ::munmap(p, size); }),
          size};
}

Mapping map_file(const std::string& file) {
  // O_NONBLOCK: opening a pipe without a writer would otherwise wait for ever.
  const int descriptor = ::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) {
    bad_input("cannot read {}: {}. Check the path and its permissions", file, std::strerror(errno));
  }
  const std::unique_ptr<const int, void (*)(const int*)> closer(&descriptor,
                                                                [](const int* d) { ::close(*d); });
  return map_open_file(descriptor, file);
}

std::string_view header_text(const Mapping& map, const std::string& file) {
  uint64_t length = 0;
  std::memcpy(&length, map.bytes.get(), kLengthBytes);
  if (length > kLargestHeader) {
    bad_input(
        "{}: oversize header: {} bytes, at most {} allowed. Not a safetensors file, or damaged",
        file, length, kLargestHeader);
  }
  if (length > map.size - kLengthBytes) {
    bad_input(
        "{}: the header has {} bytes, but only {} follow: the file is truncated or of another "
        "format",
        file, length, map.size - kLengthBytes);
  }
  const std::string_view text(map.bytes.get() + kLengthBytes, length);
  if (!text.starts_with('{')) {
    bad_input("{}: the header does not begin with '{{': not a safetensors file, or damaged", file);
  }
  return text;
}

[[noreturn]] void bad_tensor(const std::string& file, std::string_view name,
                             std::string_view problem) {
  bad_input("{}: tensor {}: {}", file, json_quoted(name), problem);
}

// Bytes that shape x dtype takes. Zero dimensions do not excuse the others: strides multiply them.
uint64_t byte_count(const SafetensorsEntry& entry, const std::string& file) {
  const Dtype* dtype = find_dtype(entry.dtype);
  if (!dtype) {
    bad_tensor(file, entry.name, fmt::format("unknown dtype {}", json_quoted(entry.dtype)));
  }
  if (entry.shape.size() > kMostDimensions) {
    bad_tensor(
        file, entry.name,
        fmt::format("{} dimensions, at most {} allowed", entry.shape.size(), kMostDimensions));
  }
  int64_t bits = dtype->bits;
  bool empty = false;
  for (const int64_t size : entry.shape) {
    if (size < 0) bad_tensor(file, entry.name, fmt::format("negative size {} in its shape", size));
    if (size == 0) empty = true;
    if (size > 0 && __builtin_mul_overflow(bits, size, &bits)) {
      bad_tensor(file, entry.name,
                 fmt::format("its shape [{}] overflows", fmt::join(entry.shape, ",")));
    }
  }
  if (empty) return 0;
  if (bits % 8 != 0) bad_tensor(file, entry.name, "its values do not fill whole bytes");
  return static_cast<uint64_t>(bits) / 8;
}

SafetensorsEntry read_entry(const std::string& name, const JsonValue& fields,
                            const std::string& file, uint64_t data_size) {
  SafetensorsEntry entry{name, fields.at("dtype").as_string(), fields.at("shape").as_integers(), 0,
                         0};
  const std::vector<int64_t> offsets = fields.at("data_offsets").as_integers();
  if (offsets.size() != 2 || offsets[0] < 0 || offsets[1] < offsets[0]) {
    bad_tensor(
        file, name,
        fmt::format("data_offsets [{}] are not two ascending positions", fmt::join(offsets, ",")));
  }
  entry.begin = static_cast<uint64_t>(offsets[0]);
  entry.end = static_cast<uint64_t>(offsets[1]);
  if (const uint64_t bytes = byte_count(entry, file); entry.end - entry.begin != bytes) {
    bad_tensor(file, name,
               fmt::format("{} [{}] takes {} bytes, but its data_offsets hold {}", entry.dtype,
                           fmt::join(entry.shape, ","), bytes, entry.end - entry.begin));
  }
  if (entry.end > data_size) {
    bad_tensor(
        file, name,
        fmt::format("its data ends at byte {} of the data, but the file holds {}: the file is "
                    "truncated or its offsets are wrong",
                    entry.end, data_size));
  }
  return entry;
}

// The entries, sorted by their data, must tile it.
void require_tiling(const std::vector<SafetensorsEntry>& entries, const std::string& file,
                    uint64_t data_size) {
  uint64_t end = 0;
  for (const SafetensorsEntry& entry : entries) {
    if (entry.begin < end) {
      bad_tensor(file, entry.name,
                 fmt::format("its data at byte {} overlaps the tensor before it, "
                             "which ends at {}",
                             entry.begin, end));
    }
    if (entry.begin > end) {
      bad_tensor(file, entry.name,
                 fmt::format("its data begins at byte {}, but the tensor before it "
                             "ends at {}: a hole",
                             entry.begin, end));
    }
    end = entry.end;
  }
  if (end != data_size) {
    bad_input("{}: {} trailing bytes after the last tensor: damaged, or not written as safetensors",
              file, data_size - end);
  }
}

template <class Bytes>
void require_booleans(const Bytes& bytes, const SafetensorsEntry& entry, const std::string& file) {
  const auto bad = std::find_if(bytes.begin(), bytes.end(),
                                [](char c) { return static_cast<unsigned char>(c) > 1; });
  if (bad == bytes.end()) return;
  bad_tensor(file, entry.name,
             fmt::format("a BOOL is {} (element {}); expected 0 or 1",
                         static_cast<unsigned char>(*bad), bad - bytes.begin()));
}

}  // namespace

std::string safetensors_dtype(at::ScalarType type) {
  const Dtype* dtype = find_dtype(type);
  if (!dtype) {
    bad_input("dtype {} cannot be written as safetensors; expected one of {}", c10::toString(type),
              kReadable);
  }
  return dtype->name;
}

at::ScalarType safetensors_scalar_type(std::string_view dtype) {
  const Dtype* found = find_dtype(dtype);
  if (!found || !found->type) {
    bad_input("dtype {} is not supported; expected one of {}", json_quoted(dtype), kReadable);
  }
  return *found->type;
}

struct SafetensorsFile::State {
  std::string file;
  std::shared_ptr<char> mapping;
  uint64_t size = 0;  // of the file
  char* data = nullptr;
  std::vector<SafetensorsEntry> entries;
  std::map<std::string, size_t, std::less<>> index;
  std::map<std::string, std::string> metadata;
};

SafetensorsFile SafetensorsFile::open(const std::filesystem::path& path) {
  auto state = std::make_shared<State>();
  state->file = path.string();
  const Mapping map = map_file(state->file);
  const std::string_view header = header_text(map, state->file);
  const uint64_t data_size = map.size - kLengthBytes - header.size();
  state->mapping = map.bytes;
  state->size = map.size;
  state->data = map.bytes.get() + kLengthBytes + header.size();

  const JsonValue root = parse_json(header, state->file + ": header (from byte 8)");
  for (const auto& [name, value] : root.members()) {
    if (name == kMetadataKey) {
      for (const auto& [key, text] : value.members()) state->metadata[key] = text.as_string();
    } else {
      state->entries.push_back(read_entry(name, value, state->file, data_size));
    }
  }
  std::sort(state->entries.begin(), state->entries.end(), [](const auto& a, const auto& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  require_tiling(state->entries, state->file, data_size);
  for (size_t i = 0; i < state->entries.size(); ++i) state->index[state->entries[i].name] = i;
  return SafetensorsFile(std::move(state));
}

const std::vector<SafetensorsEntry>& SafetensorsFile::entries() const { return state_->entries; }

const std::map<std::string, std::string>& SafetensorsFile::metadata() const {
  return state_->metadata;
}

std::string_view SafetensorsFile::bytes() const { return {state_->mapping.get(), state_->size}; }

bool SafetensorsFile::contains(std::string_view name) const {
  return state_->index.find(name) != state_->index.end();
}

const SafetensorsEntry& SafetensorsFile::entry(std::string_view name) const {
  const auto found = state_->index.find(name);
  if (found != state_->index.end()) return state_->entries[found->second];
  constexpr size_t kShown = 8;
  std::vector<std::string> known;
  for (const auto& [other, index] : state_->index) {
    if (known.size() < kShown) known.push_back(json_quoted(other));
  }
  bad_tensor(state_->file, name,
             fmt::format("not in the file, which holds {} tensors: {}{}", state_->index.size(),
                         fmt::join(known, ", "), state_->index.size() > kShown ? ", ..." : ""));
}

at::Tensor SafetensorsFile::tensor(std::string_view name, Alignment alignment) const {
  const SafetensorsEntry& found = entry(name);
  const std::optional<at::ScalarType> type = find_dtype(found.dtype)->type;
  if (!type) {
    bad_tensor(
        state_->file, name,
        fmt::format("dtype {} is not supported; expected one of {}", found.dtype, kReadable));
  }
  char* const data = state_->data + found.begin;
  const std::string_view bytes(data, found.end - found.begin);
  if (*type == at::kBool) require_booleans(bytes, found, state_->file);
  const auto options = at::TensorOptions(*type);
  const uintptr_t unit = alignment == Alignment::kLine ? kLineBytes : c10::elementSize(*type);
  if (!bytes.empty() && reinterpret_cast<uintptr_t>(data) % unit == 0) {
    return at::from_blob(
        data, found.shape, [map = state_->mapping](void*) {}, options);
  }
  at::Tensor copy = at::empty(found.shape, options);
  if (!bytes.empty()) std::memcpy(copy.mutable_data_ptr(), bytes.data(), bytes.size());
  return copy;
}

namespace {

struct Item {
  const std::string* name;
  const SafetensorsSource* source;
  const Dtype* dtype;

  uint64_t bytes() const {
    return static_cast<uint64_t>(c10::multiply_integers(source->shape) * dtype->bits / 8);
  }
};

std::string json_text(const std::string& text, const std::string& file) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::type_error&) {
    bad_input("cannot write {}: {} is not valid UTF-8", file, json_quoted(text));
  }
}

std::vector<Item> in_file_order(const std::map<std::string, SafetensorsSource>& sources,
                                const std::string& file) {
  std::vector<Item> items;
  for (const auto& [name, source] : sources) {
    if (name == kMetadataKey)
      bad_tensor(file, name, "cannot be written: the format reserves its name");
    const Dtype* dtype = find_dtype(source.dtype);
    if (!dtype) {
      bad_tensor(file, name,
                 fmt::format("cannot be written: dtype {} is not one of {}",
                             c10::toString(source.dtype), kReadable));
    }
    items.push_back({&name, &source, dtype});
  }
  std::stable_sort(items.begin(), items.end(),
                   [](const Item& a, const Item& b) { return a.dtype < b.dtype; });
  return items;
}

// Length and JSON, padded. Key order and absent white space are the reference writer's.
std::string make_header(const std::vector<Item>& items,
                        const std::map<std::string, std::string>& metadata,
                        const std::string& file) {
  std::vector<std::string> members;
  if (!metadata.empty()) {
    std::vector<std::string> pairs;
    for (const auto& [key, value] : metadata) {
      pairs.push_back(json_text(key, file) + ":" + json_text(value, file));
    }
    members.push_back(fmt::format("\"{}\":{{{}}}", kMetadataKey, fmt::join(pairs, ",")));
  }
  uint64_t begin = 0;
  for (const Item& item : items) {
    const uint64_t end = begin + item.bytes();
    members.push_back(fmt::format(R"({}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
                                  json_text(*item.name, file), item.dtype->name,
                                  fmt::join(item.source->shape, ","), begin, end));
    begin = end;
  }
  std::string text = fmt::format("{{{}}}", fmt::join(members, ","));
  text.append((8 - text.size() % 8) % 8, ' ');
  const uint64_t length = text.size();
  if (length > kLargestHeader) {
    bad_input(
        "cannot write {}: its header would have {} bytes, at most {} allowed; write fewer tensors "
        "a "
        "file",
        file, length, kLargestHeader);
  }
  return std::string(reinterpret_cast<const char*>(&length), kLengthBytes) + text;
}

}  // namespace

void stream_safetensors(const std::filesystem::path& path,
                        const std::map<std::string, SafetensorsSource>& sources,
                        const std::map<std::string, std::string>& metadata) {
  const std::vector<Item> items = in_file_order(sources, path.string());
  const std::string header = make_header(items, metadata, path.string());
  AtomicFile out(path);
  out.append(header);
  for (const Item& item : items) {
    const at::Tensor plain = item.source->make().detach().cpu().resolve_neg().contiguous();
    SP_CHECK(plain.scalar_type() == item.source->dtype && plain.sizes() == item.source->shape,
             "{} was made as {} {}", json_quoted(*item.name), c10::toString(plain.scalar_type()),
             c10::str(plain.sizes()));
    out.append({static_cast<const char*>(plain.const_data_ptr()), plain.nbytes()});
  }
  out.commit();
}

void save_safetensors(const std::filesystem::path& path,
                      const std::map<std::string, at::Tensor>& tensors,
                      const std::map<std::string, std::string>& metadata) {
  std::map<std::string, SafetensorsSource> sources;
  for (const auto& [name, tensor] : tensors) {
    SP_CHECK(tensor.defined(), "tensor {} to be saved in {}", json_quoted(name), path.string());
    if (tensor.layout() != at::kStrided || tensor.is_meta()) {
      bad_tensor(path.string(), name, "cannot be written: it is sparse or has no data");
    }
    sources[name] = {tensor.scalar_type(), tensor.sizes().vec(), [tensor] { return tensor; }};
  }
  stream_safetensors(path, sources, metadata);
}

}  // namespace shardproof
