#include "models/checkpoint.h"

#include <ATen/ATen.h>

#include <atomic>
#include <nlohmann/json.hpp>
#include <set>

#include "io/safetensors.h"
#include "tests/file_support.h"
#include "tests/models/checkpoint_support.h"

namespace shardproof::models {
namespace {

namespace fs = std::filesystem;
using tests::check_same;
using tests::contains;
using tests::error_text;
using tests::read_bytes;
using tests::replaced;
using tests::TempFolder;
using tests::Tensors;
using tests::tiny_config;
using tests::tiny_parameters;
using tests::to_map;
using tests::write_bytes;

constexpr const char* kSingle = "diffusion_pytorch_model.safetensors";
constexpr const char* kIndex = "diffusion_pytorch_model.safetensors.index.json";
constexpr int64_t kShardBytes = 50'000;  // several shards of several tensors

std::string shard_name(int i, int count) {
  return fmt::format("diffusion_pytorch_model-{:05}-of-{:05}.safetensors", i, count);
}

std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

std::string load_error(const fs::path& folder) {
  std::string text = error_text([&] { load_model(folder); });
  CHECK(contains(text, folder.string()));
  return text;
}

Tensors read_tensors(const fs::path& path) {
  const auto file = SafetensorsFile::open(path);
  Tensors all;
  for (const SafetensorsEntry& entry : file.entries()) all[entry.name] = file.tensor(entry.name);
  return all;
}

// A folder with the tiny model in shards, to be damaged.
struct ShardedFolder {
  ShardedFolder() {
    save_model(folder.path(), tiny_config(), tiny_parameters(1), kShardBytes);
    count = static_cast<int>(folder.file_count()) - 2;
    REQUIRE(count >= 5);
  }
  fs::path shard(int i) const { return folder / shard_name(i, count); }
  // Some tensor of that shard.
  std::string tensor_of(int i) const { return read_tensors(shard(i)).begin()->first; }
  void change_index(const std::string& tensor, const std::string& file) const {
    auto index = nlohmann::json::parse(read_bytes(folder / kIndex));
    index["weight_map"][tensor] = file;
    write_bytes(folder / kIndex, index.dump());
  }
  std::string error() const { return load_error(folder.path()); }

  TempFolder folder;
  int count = 0;
};

TEST_CASE("a model in one file survives a round trip", "[checkpoint]") {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16}) {
    const TempFolder folder;
    const ParameterSet saved = tiny_parameters(1, dtype);
    save_model(folder / "a/b", tiny_config(), saved);
    CHECK(names_in(folder / "a/b") == std::set<std::string>{"config.json", kSingle});
    const LoadedModel loaded = load_model(folder / "a/b");
    CHECK(loaded.model->class_name() == "QwenImageTransformer2DModel");
    check_same(loaded.parameters, saved);
    const JsonValue config = read_json_file(folder / "a/b/config.json");
    CHECK(config.raw() == tiny_config().raw());
    // The form of the goldens: another name.
    fs::rename(folder / "a/b" / kSingle, folder / "a/b/model.safetensors");
    check_same(load_model(folder / "a/b").parameters, saved);
  }
}

TEST_CASE("a model in shards survives a round trip, in diffusers' form", "[checkpoint]") {
  const ShardedFolder saved;
  const ParameterSet expected = tiny_parameters(1);
  check_same(load_model(saved.folder.path()).parameters, expected);
  std::set<std::string> names = {"config.json", kIndex};
  const JsonValue index = read_json_file(saved.folder / kIndex);
  int64_t total = 0;
  size_t tensors = 0;
  for (int i = 1; i <= saved.count; ++i) {
    names.insert(shard_name(i, saved.count));
    int64_t bytes = 0;
    for (const auto& [name, tensor] : read_tensors(saved.shard(i))) {
      CHECK(index.at("weight_map").at(name).as_string() == shard_name(i, saved.count));
      bytes += static_cast<int64_t>(tensor.nbytes());
      ++tensors;
    }
    CHECK(bytes <= kShardBytes);
    total += bytes;
    CHECK(SafetensorsFile::open(saved.shard(i)).metadata().at("format") == "pt");
  }
  CHECK(names_in(saved.folder.path()) == names);
  CHECK(tensors == expected.specs().size());
  CHECK(index.at("weight_map").members().size() == tensors);
  CHECK(index.at("metadata").at("total_size").as_integer() == total);
  CHECK(total == expected.count() * 8);
}

TEST_CASE("a tensor larger than a shard gets one of its own", "[checkpoint]") {
  const TempFolder folder;
  const ParameterSet saved = tiny_parameters(1, at::kHalf);
  save_model(folder.path(), tiny_config(), saved, 1);
  CHECK(folder.file_count() == saved.specs().size() + 2);
  check_same(load_model(folder.path()).parameters, saved);
}

TEST_CASE("a save takes the place of whatever model was there", "[checkpoint]") {
  const TempFolder folder;
  const auto save = [&](uint64_t seed, int64_t shard_bytes) {
    save_model(folder.path(), tiny_config(), tiny_parameters(seed), shard_bytes);
    check_same(load_model(folder.path()).parameters, tiny_parameters(seed));
    return names_in(folder.path());
  };
  save_safetensors(folder / "model.safetensors", to_map(tiny_parameters(9)));
  write_bytes(folder / "notes.txt", "mine");
  const auto many = save(1, 5'000);
  CHECK_FALSE(many.contains("model.safetensors"));
  const auto fewer = save(2, kShardBytes);
  CHECK(fewer.size() < many.size());
  CHECK(save(3, kShardBytes) == fewer);
  CHECK(save(4, 1 << 30) == std::set<std::string>{"config.json", "notes.txt", kSingle});
  CHECK(save(5, kShardBytes) == fewer);
  CHECK(read_bytes(folder / "notes.txt") == "mine");
}

TEST_CASE("a loaded model may be saved into its own folder", "[checkpoint]") {
  const ShardedFolder saved;
  const LoadedModel loaded = load_model(saved.folder.path());
  save_model(saved.folder.path(), tiny_config(), loaded.parameters, kShardBytes);
  check_same(load_model(saved.folder.path()).parameters, tiny_parameters(1));
  save_model(saved.folder.path(), tiny_config(), loaded.parameters);
  check_same(load_model(saved.folder.path()).parameters, tiny_parameters(1));
  check_same(loaded.parameters, tiny_parameters(1));  // its files are gone, its data is not
}

TEST_CASE("a linked shard is replaced, not what the link points to", "[checkpoint]") {
  const ShardedFolder saved;
  const TempFolder cache;
  fs::rename(saved.shard(1), cache / "blob");
  fs::create_symlink(cache / "blob", saved.shard(1));
  const std::string before = read_bytes(cache / "blob");
  check_same(load_model(saved.folder.path()).parameters, tiny_parameters(1));
  save_model(saved.folder.path(), tiny_config(), tiny_parameters(2), kShardBytes);
  check_same(load_model(saved.folder.path()).parameters, tiny_parameters(2));
  CHECK(read_bytes(cache / "blob") == before);
}

TEST_CASE("a save that fails leaves the old model", "[checkpoint]") {
  const ShardedFolder saved;
  const auto names = names_in(saved.folder.path());
  const auto text = [&](const ParameterSet& parameters, const JsonValue& config = tiny_config()) {
    std::string error =
        error_text([&] { save_model(saved.folder.path(), config, parameters, 5'000); });
    CHECK(names_in(saved.folder.path()) == names);
    check_same(load_model(saved.folder.path()).parameters, tiny_parameters(1));
    return error;
  };
  ParameterSet parameters = tiny_parameters(2);
  parameters.set("proj_out.bias", at::empty({8}, at::kMeta));  // found when its shard is written
  CHECK(contains(text(parameters), "has no data"));
  parameters.set("proj_out.bias", at::zeros({8}, at::kLong));
  CHECK(contains(text(parameters), "tensor \"proj_out.bias\": expected Double, Float, Half"));
  parameters = tiny_parameters(2);
  parameters.add({"block.lora_A.weight", {2, 2}}, at::ones({2, 2}));
  CHECK(contains(text(parameters), "tensor \"block.lora_A.weight\" is not of this model"));
  const std::string other = replaced(tiny_config().raw().dump(), R"("joint_attention_dim":12)",
                                     R"("joint_attention_dim":13)");
  CHECK(contains(text(tiny_parameters(2), parse_json(other, "other")),
                 "tensor \"txt_norm.weight\": expected shape [13], found [12]"));
  const std::string deeper = replaced(other, R"("num_layers":2)", R"("num_layers":3)");
  CHECK(contains(text(tiny_parameters(2), parse_json(deeper, "deeper")),
                 "tensor \"transformer_blocks.2.attn.to_q.weight\" is missing"));
  CHECK(contains(text(tiny_parameters(2), parse_json("{}", "empty")), "_class_name"));
  write_bytes(saved.folder / "file", "");
  CHECK(contains(
      error_text([&] { save_model(saved.folder / "file", tiny_config(), tiny_parameters(1)); }),
      (saved.folder / "file").string()));
}

TEST_CASE("all that is wrong with a folder is one error", "[checkpoint]") {
  const ShardedFolder saved;
  // Shard 1: one tensor fewer, one of another shape, one of another dtype.
  Tensors first = read_tensors(saved.shard(1));
  REQUIRE(first.size() >= 4);
  auto it = first.begin();
  const std::string absent = it->first, reshaped = (++it)->first, integers = (++it)->first;
  first.erase(absent);
  first[reshaped] = at::ones({3, 5});
  first[integers] = at::zeros(first[integers].sizes(), at::kInt);
  save_safetensors(saved.shard(1), first);
  // Shard 2: one of shard 3's and one of no model.
  Tensors second = read_tensors(saved.shard(2));
  const std::string twice = saved.tensor_of(3);
  second[twice] = at::ones({1});
  second["surplus"] = at::ones({1});
  save_safetensors(saved.shard(2), second);
  // Shard 4: cut off. Shard 5: gone.
  const std::string whole = read_bytes(saved.shard(4));
  write_bytes(saved.shard(4), std::string_view(whole).substr(0, whole.size() - 5));
  fs::remove(saved.shard(5));
  const std::string text = saved.error();
  CHECK(contains(text, "as QwenImageTransformer2DModel, 8 problems:"));
  for (const std::string& part :
       {fmt::format("names \"{}\", which is missing", shard_name(5, saved.count)),
        fmt::format("{}: tensor \"{}\": expected shape [", shard_name(1, saved.count), reshaped),
        std::string("found [3,5]"),
        fmt::format("tensor \"{}\": expected dtype F64, F32, F16 or BF16, found I32", integers),
        fmt::format("tensor \"{}\": expected shape", twice),
        std::string("tensor \"surplus\": not a tensor of this model"),
        fmt::format("tensor \"{}\": is also in {}", twice, shard_name(2, saved.count)),
        fmt::format("{}: tensor", saved.shard(4).string()), std::string("truncated"),
        fmt::format("says that {} holds tensor \"{}\", which is not there",
                    shard_name(1, saved.count), absent)}) {
    INFO(part << "\n" << text);
    CHECK(contains(text, part));
  }

  // With a bad configuration as well: what can be said of the files is still said.
  const std::string config = tiny_config().raw().dump();
  write_bytes(saved.folder / "config.json",
              replaced(replaced(config, R"("in_channels":8)", R"("in_channels":-8)"),
                       R"("num_layers":2)", R"("num_heads":2)"));
  const std::string both = saved.error();
  for (const std::string& part :
       {std::string("4 problems:"), std::string("in_channels is -8"), std::string("\"num_heads\""),
        fmt::format("names \"{}\", which is missing", shard_name(5, saved.count)),
        std::string("truncated"), fmt::format("holds tensor \"{}\"", absent)}) {
    INFO(part << "\n" << both);
    CHECK(contains(both, part));
  }
}

TEST_CASE("a file that cannot be read does not bury the rest under its tensors", "[checkpoint]") {
  const TempFolder folder;
  save_model(folder.path(), tiny_config(), tiny_parameters(1));
  const std::string whole = read_bytes(folder / kSingle);
  for (const size_t size : {size_t{0}, size_t{5}, size_t{1000}, whole.size() - 1}) {
    write_bytes(folder / kSingle, std::string_view(whole).substr(0, size));
    CHECK(contains(load_error(folder.path()), "1 problem:"));
  }
  Tensors fewer = to_map(tiny_parameters(1));
  fewer.erase("proj_out.bias");
  fewer.erase("img_in.weight");
  save_safetensors(folder / kSingle, fewer);
  const std::string text = load_error(folder.path());
  CHECK(contains(text, "2 problems:"));
  CHECK(contains(text, "tensor \"proj_out.bias\" is missing"));
  CHECK(contains(text, "tensor \"img_in.weight\" is missing"));
}

TEST_CASE("what is no model folder is refused", "[checkpoint]") {
  const TempFolder folder;
  CHECK(contains(load_error(folder / "missing"), "no model folder"));
  const std::string empty = load_error(folder.path());
  CHECK(contains(empty, "2 problems:"));
  CHECK(contains(empty, "config.json"));
  CHECK(contains(empty, "no weights: expected model.safetensors or diffusion_pytorch_model"));
  save_model(folder.path(), tiny_config(), tiny_parameters(1));
  write_bytes(folder / "config.json", R"({"_class_name": "UNet2DConditionModel"})");
  const std::string unknown = load_error(folder.path());
  CHECK(contains(unknown, "1 problem:"));
  CHECK(contains(unknown, "_class_name is \"UNet2DConditionModel\"; known: QwenImage"));
}

TEST_CASE("two forms of weights in a folder are refused: one is out of date", "[checkpoint]") {
  const ShardedFolder saved;
  save_safetensors(saved.folder / kSingle, to_map(tiny_parameters(2)));
  const std::string text = saved.error();
  CHECK(contains(text, "1 problem:"));
  CHECK(contains(text, fmt::format("several weights: {}, {};", kSingle, kIndex)));
}

TEST_CASE("an index names files of its folder alone", "[checkpoint]") {
  const ShardedFolder saved;
  const TempFolder elsewhere;
  const std::string tensor = saved.tensor_of(1);
  save_safetensors(elsewhere / "x.safetensors", {{tensor, read_tensors(saved.shard(1))[tensor]}});
  fs::create_directory(saved.folder / "sub");
  fs::copy(elsewhere / "x.safetensors", saved.folder / "sub/x.safetensors");
  for (const std::string& name :
       {(fs::path("..") / elsewhere.path().filename() / "x.safetensors").string(),
        (elsewhere / "x.safetensors").string(), std::string("sub/x.safetensors"),
        std::string("./x.safetensors"), std::string(".."), std::string(".")}) {
    INFO(name);
    saved.change_index(tensor, name);
    const std::string text = saved.error();
    CHECK(contains(text, "1 problem:"));
    CHECK(contains(text, fmt::format("names the file \"{}\"; expected a name in the same", name)));
  }
  // A link out of the folder is the owner's will.
  fs::create_symlink(elsewhere / "x.safetensors", saved.folder / "link.safetensors");
  saved.change_index(tensor, "link.safetensors");
  Tensors first = read_tensors(saved.shard(1));
  first.erase(tensor);
  save_safetensors(saved.shard(1), first);
  check_same(load_model(saved.folder.path()).parameters, tiny_parameters(1));
}

TEST_CASE("an index must be one, and name the file that has the tensor", "[checkpoint]") {
  const ShardedFolder saved;
  const std::string tensor = saved.tensor_of(1);
  saved.change_index(tensor, shard_name(2, saved.count));
  const std::string text = saved.error();
  CHECK(contains(text, "1 problem:"));
  CHECK(contains(text, fmt::format("says that {} holds tensor \"{}\", which is not there",
                                   shard_name(2, saved.count), tensor)));
  for (const char* bad : {"{", "{}", R"({"weight_map": []})"}) {
    write_bytes(saved.folder / kIndex, bad);
    CHECK(contains(saved.error(), "1 problem:"));
    CHECK(contains(saved.error(), kIndex));
  }
  write_bytes(saved.folder / kIndex, R"({"weight_map": {"proj_out.bias": 1}})");
  CHECK(contains(saved.error(), "weight_map.proj_out.bias: expected a string"));
}

TEST_CASE("errors come in the files' order, whatever thread was first", "[checkpoint]") {
  const TempFolder folder;
  save_model(folder.path(), tiny_config(), tiny_parameters(1), 1);
  const auto files = names_in(folder.path());
  for (const std::string& name : files) {
    if (contains(name, "-of-")) fs::resize_file(folder / name, 20);
  }
  const std::string text = load_error(folder.path());
  size_t last = 0;
  for (int i = 1; i <= 20; ++i) {
    const size_t at = text.find(fmt::format("model-{:05}-of-", i));
    REQUIRE(at != std::string::npos);
    CHECK(at > last);
    last = at;
  }
  for (int i = 0; i < 20; ++i) CHECK(load_error(folder.path()) == text);
}

TEST_CASE("progress counts up to all tensors, one call at a time", "[checkpoint]") {
  const TempFolder folder;
  const ParameterSet saved = tiny_parameters(1);
  save_model(folder.path(), tiny_config(), saved, 1);
  const auto all = static_cast<int64_t>(saved.specs().size());
  std::vector<int64_t> seen;
  std::atomic<int> inside = 0;
  bool overlapped = false;
  load_model(folder.path(), [&](int64_t done, int64_t of) {
    if (++inside > 1) overlapped = true;
    seen.push_back(of == all ? done : -1);
    --inside;
  });
  CHECK_FALSE(overlapped);
  std::vector<int64_t> expected(static_cast<size_t>(all));
  for (int64_t i = 0; i < all; ++i) expected[static_cast<size_t>(i)] = i + 1;
  CHECK(seen == expected);

  int calls = 0;
  CHECK_THROWS_WITH(load_model(folder.path(),
                               [&](int64_t done, int64_t) {
                                 ++calls;
                                 if (done == 3) throw std::runtime_error("enough");
                               }),
                    "enough");
  CHECK(calls == 3);
}

TEST_CASE("leaves lie on 64-byte lines wherever the file has its data", "[checkpoint]") {
  const TempFolder folder;
  const ParameterSet saved = tiny_parameters(1);
  const auto off_line = [](const at::Tensor& tensor) {
    return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 64 != 0;
  };
  int off = 0;
  for (const char* padding : {"", "12345678"}) {  // the second moves the data by 8 bytes
    save_model(folder.path(), tiny_config(), saved);
    save_safetensors(folder / kSingle, to_map(saved), {{"format", "pt"}, {"padding", padding}});
    const LoadedModel loaded = load_model(folder.path());
    const ParameterSet leaves = loaded.parameters.leaves(at::kDouble, at::kCPU);
    for (const ParameterSpec& spec : saved.specs()) {
      off += off_line(loaded.parameters[spec.name]) ? 1 : 0;
      CHECK_FALSE(off_line(leaves[spec.name]));
    }
    check_same(leaves, saved);
  }
  CHECK(off > 0);  // else nothing was tested
}

}  // namespace
}  // namespace shardproof::models
