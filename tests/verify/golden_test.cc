#include "verify/golden.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "io/safetensors.h"
#include "tests/file_support.h"

namespace shardproof::verify {
namespace {

namespace fs = std::filesystem;
using tests::contains;
using tests::error_text;
using tests::TempFolder;
using tests::write_bytes;

const fs::path kGoldens = SHARDPROOF_SOURCE_DIR "/datasets/goldens";
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// A small golden in memory, to be spoilt and written. Its results are no attention: a loader cannot
// know. B=2, S=5 (2 text), H=4, Hkv=2, D=3; sample 1 has no valid key.
struct Draft {
  nlohmann::json record = {{"case", "x"},   {"kind", "attention"},   {"scale", "1/sqrt(D)"},
                           {"batch", 2},    {"tokens", 5},           {"heads", 4},
                           {"kv_heads", 2}, {"head_dim", 3},         {"text", 2},
                           {"image", 3},    {"order", "text, image"}};
  std::map<std::string, at::Tensor> inputs;
  std::map<std::string, at::Tensor> expected;

  Draft() {
    const auto filled = [](at::IntArrayRef shape, at::ScalarType type, double phase) {
      int64_t count = 1;
      for (const int64_t size : shape) count *= size;
      return at::sin(at::arange(count, at::kDouble) + phase).view(shape).to(type);
    };
    for (const char* name : {"q", "cotangent"})
      inputs[name] = filled({2, 5, 4, 3}, at::kFloat, *name);
    for (const char* name : {"k", "v"}) inputs[name] = filled({2, 5, 2, 3}, at::kFloat, *name);
    inputs["mask"] = at::ones({2, 5}, at::kBool);
    inputs["mask"][1].fill_(false);
    inputs["mask"][0][1].fill_(false);
    for (const char* name : {"out", "dq"})
      expected[name] = filled({2, 5, 4, 3}, at::kDouble, name[1]);
    for (const char* name : {"dk", "dv"})
      expected[name] = filled({2, 5, 2, 3}, at::kDouble, name[1]);
    expected["lse"] = filled({2, 4, 5}, at::kDouble, 0);
    expected["lse"][1].fill_(-kInfinity);
    expected["loss"] = (expected["out"] * inputs["cotangent"].to(at::kDouble)).sum();
  }

  void write(const fs::path& folder) const {
    fs::create_directories(folder);
    write_bytes(folder / "case.json", record.dump());
    save_safetensors(folder / "inputs.safetensors", inputs);
    save_safetensors(folder / "expected.safetensors", expected);
  }
  AttentionGolden load() const {
    const TempFolder folder;
    write(folder / "g");
    return load_attention_golden(folder / "g");
  }
  std::string error() const {
    return error_text([&] { load(); });
  }
};

TEST_CASE("the attention goldens load", "[golden]") {
  int count = 0;
  for (const fs::path& folder : find_goldens(kGoldens)) {
    if (golden_kind(folder) != "attention") continue;
    INFO(folder.string());
    const AttentionGolden golden = load_attention_golden(folder);
    ++count;
    CHECK(golden.name == folder.filename().string());
    CHECK(golden.q.sizes() ==
          at::IntArrayRef({golden.batch, golden.tokens, golden.heads, golden.head_dim}));
    CHECK(golden.q.scalar_type() == at::kFloat);
    CHECK(golden.dk.sizes() == golden.k.sizes());
    CHECK(golden.dk.scalar_type() == at::kDouble);
    CHECK(golden.lse.sizes() == at::IntArrayRef({golden.batch, golden.heads, golden.tokens}));
    CHECK(golden.kv_heads == golden.heads);
    CHECK(golden.scale == 1.0 / std::sqrt(static_cast<double>(golden.head_dim)));
    CHECK(golden.text_tokens == (golden.name == "attention_joint_textimage" ? 8 : 0));
    const bool has_mask =
        golden.name == "attention_joint_textimage" || golden.name == "attention_keymask";
    CHECK(golden.mask.defined() == has_mask);
  }
  CHECK(count >= 4);
}

TEST_CASE("a golden with grouped heads, text and a sample without keys loads", "[golden]") {
  const Draft draft;
  const AttentionGolden golden = draft.load();
  CHECK(golden.name == "g");
  CHECK(golden.folder.is_absolute());
  CHECK(golden.batch == 2);
  CHECK(golden.tokens == 5);
  CHECK(golden.heads == 4);
  CHECK(golden.kv_heads == 2);
  CHECK(golden.head_dim == 3);
  CHECK(golden.text_tokens == 2);
  CHECK(at::equal(golden.q, draft.inputs.at("q")));
  CHECK(at::equal(golden.dv, draft.expected.at("dv")));
  CHECK(at::equal(golden.mask, draft.inputs.at("mask")));
  CHECK(golden.loss == draft.expected.at("loss").item<double>());
}

TEST_CASE("optional parts: KV heads, text, mask, loss, unknown keys and tensors", "[golden]") {
  Draft draft;
  for (const char* key : {"kv_heads", "text", "image", "order", "case"}) draft.record.erase(key);
  draft.record["future"] = {{"x", 1}};
  draft.record["scale"] = 0.25;
  draft.inputs.erase("mask");
  draft.expected["lse"].fill_(1);
  draft.expected["block.0.out"] = at::zeros({1});
  const double loss = draft.expected["loss"].item<double>();
  draft.expected.erase("loss");
  const AttentionGolden golden = draft.load();
  CHECK(golden.kv_heads == 2);
  CHECK(golden.text_tokens == 0);
  CHECK(golden.scale == 0.25);
  CHECK_FALSE(golden.mask.defined());
  CHECK(golden.loss == Approx(loss));
}

TEST_CASE("goldens are found: the path itself or its subfolders, by name", "[golden]") {
  const TempFolder folder;
  const Draft draft;
  draft.write(folder / "b");
  draft.write(folder / "a");
  fs::create_directories(folder / "c/deeper");
  fs::create_directory(folder / "only_inputs");
  write_bytes(folder / "only_inputs/inputs.safetensors", "");
  write_bytes(folder / "README.md", "");
  CHECK(find_goldens(folder.path()) ==
        std::vector<fs::path>{folder / "a", folder / "b", folder / "only_inputs"});
  CHECK(find_goldens(folder / "b") == std::vector<fs::path>{folder / "b"});
  CHECK(is_golden_folder(folder / "a"));
  CHECK_FALSE(is_golden_folder(folder / "c"));
  CHECK_FALSE(is_golden_folder(folder / "a/case.json"));
  CHECK_FALSE(is_golden_folder(folder / "missing"));
  CHECK(golden_kind(folder / "a") == "attention");
}

TEST_CASE("a place without goldens is an error", "[golden]") {
  const TempFolder folder;
  CHECK(contains(error_text([&] { find_goldens(folder.path()); }),
                 "no golden in " + folder.path().string()));
  CHECK(contains(error_text([&] { find_goldens(folder / "missing"); }), "No such file"));
  write_bytes(folder / "f", "");
  CHECK(contains(error_text([&] { find_goldens(folder / "f"); }), "Not a directory"));
  CHECK(contains(error_text([&] { load_attention_golden(folder.path()); }), "is not a golden"));
  CHECK(
      contains(error_text([&] { load_attention_golden(folder / "missing"); }), "is not a golden"));
}

TEST_CASE("missing files are listed", "[golden]") {
  const TempFolder folder;
  Draft().write(folder / "g");
  fs::remove(folder / "g/inputs.safetensors");
  fs::remove(folder / "g/case.json");
  const std::string text = error_text([&] { load_attention_golden(folder / "g"); });
  CHECK(contains(text, "g cannot be used, 2 problems:\n"));
  CHECK(contains(text, "case.json: No such file"));
  CHECK(contains(text, "inputs.safetensors: No such file"));
  fs::remove(folder / "g/expected.safetensors");
  write_bytes(folder / "g/inputs.safetensors", "short");
  const std::string damaged = error_text([&] { load_attention_golden(folder / "g"); });
  CHECK(contains(damaged, "3 problems"));
  CHECK(contains(damaged, "inputs.safetensors has 5 bytes"));
  CHECK(contains(damaged, "expected.safetensors: No such file"));
}

TEST_CASE("each missing tensor is listed", "[golden]") {
  for (const char* name : {"q", "k", "v", "cotangent"}) {
    Draft draft;
    draft.inputs.erase(name);
    CHECK(contains(
        draft.error(),
        fmt::format("1 problem:\n  - inputs.safetensors: tensor \"{}\" is missing\n", name)));
  }
  for (const char* name : {"out", "lse", "dq", "dk", "dv"}) {
    Draft draft;
    draft.expected.erase(name);
    CHECK(contains(
        draft.error(),
        fmt::format("1 problem:\n  - expected.safetensors: tensor \"{}\" is missing\n", name)));
  }
}

TEST_CASE("wrong shapes are listed", "[golden]") {
  const Draft valid;
  for (auto part : {&Draft::inputs, &Draft::expected}) {
    for (const auto& [name, tensor] : valid.*part) {
      INFO(name);
      Draft draft;
      (draft.*part)[name] = at::cat({tensor.reshape({-1}), tensor.reshape({-1})});
      const std::string text = draft.error();
      CHECK(contains(text, fmt::format("tensor \"{}\" has shape [{}]", name, 2 * tensor.numel())));
      CHECK(contains(text, "1 problem:"));
    }
  }
  Draft draft;
  draft.expected["lse"] = draft.expected["lse"].transpose(1, 2);
  CHECK(contains(draft.error(), "tensor \"lse\" has shape [2,5,4]; expected [2,4,5]"));
}

TEST_CASE("wrong dtypes are listed", "[golden]") {
  const Draft valid;
  for (auto part : {&Draft::inputs, &Draft::expected}) {
    for (const auto& [name, tensor] : valid.*part) {
      INFO(name);
      Draft draft;
      (draft.*part)[name] = tensor.to(at::kBFloat16);
      const std::string text = draft.error();
      CHECK(contains(text, fmt::format("tensor \"{}\" has dtype BF16; expected ", name)));
      CHECK(contains(text, "1 problem:"));
    }
  }
}

TEST_CASE("values that are not finite are listed, with their place", "[golden]") {
  const Draft valid;
  for (const double bad : {kNaN, kInfinity, -kInfinity}) {
    for (auto part : {&Draft::inputs, &Draft::expected}) {
      for (const auto& [name, tensor] : valid.*part) {
        if (name == "mask") continue;
        INFO(name << " " << bad);
        Draft draft;
        (draft.*part)[name].view({-1})[tensor.numel() / 3].fill_(bad);
        const std::string text = draft.error();
        CHECK(contains(text, fmt::format("tensor \"{}\" has 1 of {} values that are not finite",
                                         name, tensor.numel())));
        CHECK(contains(text, "1 problem:"));
      }
    }
  }
  Draft draft;
  draft.inputs["k"][1][4][0][2].fill_(kNaN);
  draft.inputs["k"][1][4][1][2].fill_(kInfinity);
  CHECK(contains(draft.error(),
                 "has 2 of 60 values that are not finite, the first is nan at [1,4,0,2]"));
}

TEST_CASE("lse is -inf where a sample has no valid key, and only there", "[golden]") {
  Draft zero;
  zero.expected["lse"][1][3][4].fill_(0);  // what some kernels say of such a query
  const std::string text = zero.error();
  CHECK(contains(text, "tensor \"lse\" has 1 of 40 values that are not finite (-inf for"));
  CHECK(contains(text, "is 0 at [1,3,4]"));
  Draft unmasked;
  unmasked.inputs.erase("mask");
  CHECK(contains(unmasked.error(), "tensor \"lse\" has 20 of 40 values"));
  Draft nan;
  nan.expected["lse"][1][0][0].fill_(kNaN);
  CHECK(contains(nan.error(), "is nan at [1,0,0]"));
}

TEST_CASE("the loss must be that of out and cotangent", "[golden]") {
  Draft draft;
  const double loss = draft.expected["loss"].item<double>();
  const double tolerance = 1e-9 * std::max(1.0, std::abs(loss));
  draft.expected["loss"].fill_(loss + 0.5 * tolerance);
  CHECK(draft.load().loss == loss + 0.5 * tolerance);
  draft.expected["loss"].fill_(loss - 2 * tolerance);
  const std::string text = draft.error();
  CHECK(contains(text, "tensor \"loss\" is "));
  CHECK(contains(text, "but sum(out * cotangent) is "));
  Draft other;
  other.expected["out"][0][0][0][0].add_(1e-6);
  CHECK(contains(other.error(), "but sum(out * cotangent) is "));
}

TEST_CASE("values too large for a finite loss are no golden", "[golden]") {
  Draft draft;
  draft.expected["out"].fill_(std::numeric_limits<double>::max());
  draft.inputs["cotangent"].fill_(2);
  CHECK(contains(draft.error(), "but sum(out * cotangent) is inf"));
}

TEST_CASE("without case.json and q the sizes are unknown, and the rest is still reported",
          "[golden]") {
  Draft draft;
  draft.record.erase("kind");
  draft.inputs.erase("q");
  draft.inputs["mask"] = at::ones({3, 5}, at::kBool);
  draft.expected["dk"][0][0][0][0].fill_(kNaN);
  const std::string text = draft.error();
  CHECK(contains(text, "3 problems"));
  CHECK(contains(text, "\"kind\" is missing"));
  CHECK(contains(text, "\"q\" is missing"));
  CHECK(contains(text, "\"dk\" has 1 of 60 values"));
}

TEST_CASE("case.json: missing and wrong values are listed", "[golden]") {
  const auto text = [](const char* key, const nlohmann::json& value) {
    Draft draft;
    draft.record[key] = value;
    return draft.error();
  };
  for (const char* key : {"batch", "tokens", "heads", "head_dim", "scale", "kind"}) {
    Draft draft;
    draft.record.erase(key);
    const std::string error = draft.error();
    CHECK(contains(error, fmt::format("case.json: the key \"{}\" is missing", key)));
    CHECK(contains(error, "1 problem:"));
  }
  CHECK(contains(text("batch", "2"), "batch: expected an integer"));
  CHECK(contains(text("heads", 0), "heads: expected a positive number"));
  CHECK(contains(text("kv_heads", -1), "kv_heads: expected a positive number"));
  CHECK(contains(text("kv_heads", 3), "3 KV heads do not divide the 4 query heads"));
  CHECK(contains(text("tokens", 6), "tensor \"dq\" has shape [2,5,4,3]; expected [2,6,4,3]"));
  CHECK(contains(text("scale", "1/D"), "scale: expected \"1/sqrt(D)\" or a positive number"));
  CHECK(contains(text("scale", 0), "scale: expected"));
  CHECK(contains(text("scale", nullptr), "scale: expected"));
  CHECK(contains(text("text", 6), "text: expected 0 to 5 (tokens), found 6"));
  CHECK(contains(text("text", -1), "text: expected 0 to 5"));
  CHECK(contains(text("image", 4), "image: expected tokens - text = 3, found 4"));
  CHECK(contains(text("order", "image, text"), "order: expected \"text, image\""));
  Draft list;
  list.record = nlohmann::json::array();
  CHECK(contains(list.error(), "case.json: expected an object"));
}

TEST_CASE("kinds: unknown ones are errors, other ones are named", "[golden]") {
  const TempFolder folder;
  Draft draft;
  draft.record["kind"] = "attentoin";
  draft.write(folder / "g");
  for (const std::string& text : {error_text([&] { golden_kind(folder / "g"); }),
                                  error_text([&] { load_attention_golden(folder / "g"); })}) {
    CHECK(contains(text, "kind: unknown kind \"attentoin\"; expected one of: attention, model"));
    CHECK(contains(text, (folder / "g").string()));
  }
  draft.record["kind"] = "model";
  draft.inputs.clear();
  draft.write(folder / "g");
  CHECK(golden_kind(folder / "g") == "model");
  CHECK(contains(error_text([&] { load_attention_golden(folder / "g"); }),
                 "g is of kind \"model\"; expected \"attention\""));
  fs::remove(folder / "g/case.json");
  CHECK(contains(error_text([&] { golden_kind(folder / "g"); }), "case.json: No such file"));
}

TEST_CASE("all problems of a folder come in one error", "[golden]") {
  Draft draft;
  draft.record["text"] = 9;
  draft.inputs.erase("v");
  draft.inputs["q"][0][0][0][0].fill_(kNaN);
  draft.inputs["mask"] = draft.inputs["mask"].to(at::kByte);
  draft.expected["dk"] = draft.expected["dk"].to(at::kFloat);
  draft.expected["dv"] = at::zeros({2, 5, 2, 4}, at::kDouble);
  draft.expected["loss"].add_(1);
  const std::string text = draft.error();
  for (const char* part :
       {"7 problems", "text: expected 0 to 5", "\"v\" is missing", "\"q\" has 1 of 120",
        "has dtype U8", "\"dk\" has dtype F32; expected F64",
        "\"dv\" has shape [2,5,2,4]; expected [2,5,2,3]", "tensor \"loss\" is"}) {
    INFO(text);
    CHECK(contains(text, part));
  }
}

}  // namespace
}  // namespace shardproof::verify
