#include "io/safetensors.h"

#include <ATen/ATen.h>
#include <sys/stat.h>

#include <cstring>
#include <limits>
#include <optional>
#include <random>

#include "tests/file_support.h"

namespace shardproof {
namespace {

using tests::contains;
using tests::error_text;
using tests::read_bytes;
using tests::TempFolder;
using tests::write_bytes;
using Tensors = std::map<std::string, at::Tensor>;

// Length, header as given (no padding), data.
std::string file_bytes(std::string_view header, std::string_view data) {
  const uint64_t length = header.size();
  std::string bytes(reinterpret_cast<const char*>(&length), sizeof(length));
  return bytes.append(header).append(data);
}

std::string open_error(const std::filesystem::path& file) {
  return error_text([&] { SafetensorsFile::open(file); });
}

// The error of a file with this header and that many bytes of data; it must name the file.
std::string header_error(std::string_view header, size_t data_size = 8) {
  const TempFolder folder;
  const auto file = folder / "f.safetensors";
  write_bytes(file, file_bytes(header, std::string(data_size, '\0')));
  const std::string text = open_error(file);
  CHECK(contains(text, file.string()));
  return text;
}

at::Tensor random_bits(at::ScalarType type, at::IntArrayRef shape) {
  at::Tensor tensor = at::empty(shape, at::TensorOptions(type));
  static std::mt19937 random(1);
  auto* bytes = static_cast<unsigned char*>(tensor.mutable_data_ptr());
  for (size_t i = 0; i < tensor.nbytes(); ++i) {
    bytes[i] = static_cast<unsigned char>(type == at::kBool ? random() % 2 : random() % 256);
  }
  return tensor;
}

// NaN patterns count: the bytes, not the values.
bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.is_contiguous() &&
         b.is_contiguous() &&
         (a.nbytes() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0);
}

uintptr_t misalignment(const at::Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 64;
}

const std::vector<std::pair<at::ScalarType, std::string>> kTypes = {
    {at::kLong, "I64"},      {at::kDouble, "F64"}, {at::kFloat, "F32"}, {at::kInt, "I32"},
    {at::kBFloat16, "BF16"}, {at::kHalf, "F16"},   {at::kShort, "I16"}, {at::kChar, "I8"},
    {at::kByte, "U8"},       {at::kBool, "BOOL"}};

TEST_CASE("all dtypes, scalars and empty tensors survive a round trip bit by bit",
          "[safetensors]") {
  const TempFolder folder;
  Tensors saved;
  for (const auto& [type, name] : kTypes) {
    saved["matrix." + name] = random_bits(type, {3, 5});
    saved["scalar." + name] = random_bits(type, {});
    saved["empty." + name] = random_bits(type, {2, 0, 3});
    saved["one." + name] = random_bits(type, {1, 1});
  }
  save_safetensors(folder / "f", saved, {{"format", "pt"}, {"quote", "\"\\\n\u00e9"}});
  const SafetensorsFile file = SafetensorsFile::open(folder / "f");
  CHECK(file.entries().size() == saved.size());
  for (const auto& [name, tensor] : saved) {
    INFO(name);
    CHECK(file.contains(name));
    const at::Tensor loaded = file.tensor(name);
    CHECK(same_bytes(loaded, tensor));
    CHECK(misalignment(loaded) == 0);
    CHECK(name.ends_with("." + file.entry(name).dtype));
  }
  CHECK(file.metadata() ==
        std::map<std::string, std::string>{{"format", "pt"}, {"quote", "\"\\\n\u00e9"}});
  CHECK(folder.file_count() == 1);
}

TEST_CASE("a file shows all its bytes, and how it spells dtypes", "[safetensors]") {
  const TempFolder folder;
  for (const at::ScalarType type : {at::kBFloat16, at::kLong, at::kBool}) {
    save_safetensors(folder / "f", {{"x", at::zeros({3}, type)}});
    const SafetensorsFile file = SafetensorsFile::open(folder / "f");
    CHECK(file.bytes() == read_bytes(folder / "f"));
    CHECK(safetensors_dtype(type) == file.entry("x").dtype);
  }
  CHECK(contains(error_text([] { safetensors_dtype(at::kComplexFloat); }), "ComplexFloat"));
}

TEST_CASE("files are byte for byte those of the reference writer", "[safetensors]") {
  const TempFolder folder;
  Tensors tensors;
  for (const auto& [type, name] : kTypes) tensors["t_" + name] = at::ones({2}, type);
  tensors["a"] = at::zeros({0, 3}, at::kFloat);
  tensors["\u00e9\"\x01\x7f"] = at::zeros({}, at::kByte);
  save_safetensors(folder / "f", tensors, {{"format", "pt"}});
  // The header that safetensors 0.8.0 (Python) writes for these tensors.
  const std::string header =
      "{\"__metadata__\":{\"format\":\"pt\"},"
      R"("t_I64":{"dtype":"I64","shape":[2],"data_offsets":[0,16]},)"
      R"("t_F64":{"dtype":"F64","shape":[2],"data_offsets":[16,32]},)"
      R"("a":{"dtype":"F32","shape":[0,3],"data_offsets":[32,32]},)"
      R"("t_F32":{"dtype":"F32","shape":[2],"data_offsets":[32,40]},)"
      R"("t_I32":{"dtype":"I32","shape":[2],"data_offsets":[40,48]},)"
      R"("t_BF16":{"dtype":"BF16","shape":[2],"data_offsets":[48,52]},)"
      R"("t_F16":{"dtype":"F16","shape":[2],"data_offsets":[52,56]},)"
      R"("t_I16":{"dtype":"I16","shape":[2],"data_offsets":[56,60]},)"
      R"("t_I8":{"dtype":"I8","shape":[2],"data_offsets":[60,62]},)"
      R"("t_U8":{"dtype":"U8","shape":[2],"data_offsets":[62,64]},)"
      "\"\u00e9\\\"\\u0001\x7f\":"
      R"({"dtype":"U8","shape":[],"data_offsets":[64,65]},)"
      R"("t_BOOL":{"dtype":"BOOL","shape":[2],"data_offsets":[65,67]}})";
  const std::string bytes = read_bytes(folder / "f");
  const std::string padding((8 - header.size() % 8) % 8, ' ');
  const std::string expected = file_bytes(header + padding, "");
  CHECK(bytes.substr(0, expected.size()) == expected);
  CHECK(bytes.size() == expected.size() + 67);

  save_safetensors(folder / "empty", {});
  CHECK(read_bytes(folder / "empty") == file_bytes("{}      ", ""));
  CHECK(SafetensorsFile::open(folder / "empty").entries().empty());
}

TEST_CASE("goldens of the reference writer are reproduced byte for byte", "[safetensors]") {
  const std::filesystem::path goldens = SHARDPROOF_SOURCE_DIR "/datasets/goldens";
  const TempFolder folder;
  for (const char* name :
       {"attention_keymask/inputs.safetensors", "attention_keymask/expected.safetensors"}) {
    const SafetensorsFile file = SafetensorsFile::open(goldens / name);
    Tensors tensors;
    for (const SafetensorsEntry& entry : file.entries())
      tensors[entry.name] = file.tensor(entry.name);
    save_safetensors(folder / "f", tensors, file.metadata());
    CHECK(read_bytes(folder / "f") == read_bytes(goldens / name));
  }
}

TEST_CASE("strided, negated and differentiable tensors are saved as their values",
          "[safetensors]") {
  const TempFolder folder;
  const at::Tensor base = at::arange(12, at::kFloat).view({3, 4});
  at::Tensor leaf = base.clone().set_requires_grad(true);
  const at::Tensor negated = at::_neg_view(base);
  save_safetensors(folder / "f", {{"transposed", base.t()},
                                  {"column", base.select(1, 2)},
                                  {"expanded", base.select(0, 0).expand({2, 4})},
                                  {"negated", negated},
                                  {"leaf", leaf}});
  const SafetensorsFile file = SafetensorsFile::open(folder / "f");
  CHECK(at::equal(file.tensor("transposed"), base.t()));
  CHECK(at::equal(file.tensor("column"), base.select(1, 2)));
  CHECK(at::equal(file.tensor("expanded"), base.select(0, 0).expand({2, 4})));
  CHECK(at::equal(file.tensor("negated"), -base));
  CHECK(at::equal(file.tensor("leaf"), base));
}

TEST_CASE("data at any offset is read, and shared where its alignment allows", "[safetensors]") {
  const TempFolder folder;
  const at::Tensor values = random_bits(at::kDouble, {4});
  const std::string data(static_cast<const char*>(values.const_data_ptr()), values.nbytes());
  int shared = 0;
  for (size_t shift = 0; shift < 64; ++shift) {
    std::string header = R"({"t":{"dtype":"F64","shape":[4],"data_offsets":[0,32]}})";
    header.append(64 + shift - header.size(), ' ');  // the data starts at byte 72 + shift
    write_bytes(folder / "f", file_bytes(header, data));
    const SafetensorsFile file = SafetensorsFile::open(folder / "f");
    const at::Tensor first = file.tensor("t");
    const bool is_shared = first.const_data_ptr() == file.tensor("t").const_data_ptr();
    CHECK(is_shared == ((72 + shift) % 64 == 0));
    CHECK(misalignment(first) == 0);
    CHECK(same_bytes(first, values));
    shared += is_shared ? 1 : 0;
    const at::Tensor loose = file.tensor("t", Alignment::kElement);
    const bool loose_is_shared =
        loose.const_data_ptr() == file.tensor("t", Alignment::kElement).const_data_ptr();
    CHECK(loose_is_shared == ((72 + shift) % 8 == 0));
    CHECK(misalignment(loose) % 8 == 0);
    CHECK(same_bytes(loose, values));
  }
  CHECK(shared == 1);
}

TEST_CASE("the order of the header need not be that of the data", "[safetensors]") {
  const TempFolder folder;
  write_bytes(folder / "f", file_bytes(R"({"b":{"data_offsets":[1,2],"shape":[1],"dtype":"U8"},)"
                                       R"("c":{"dtype":"U8","shape":[0],"data_offsets":[1,1]},)"
                                       R"("a":{"dtype":"I8","shape":[],"data_offsets":[0,1]}})",
                                       "\x07\x08"));
  const SafetensorsFile file = SafetensorsFile::open(folder / "f");
  CHECK(file.entries()[0].name == "a");
  CHECK(file.entries()[1].name == "c");
  CHECK(file.entries()[2].name == "b");
  CHECK(file.tensor("a").item<int>() == 7);
  CHECK(file.tensor("b")[0].item<int>() == 8);
  CHECK(file.metadata().empty());
}

TEST_CASE("tensors outlive the file object and never write to the file", "[safetensors]") {
  const TempFolder folder;
  save_safetensors(folder / "f", {{"t", at::ones({100}, at::kFloat)}});
  const std::string before = read_bytes(folder / "f");
  at::Tensor tensor = SafetensorsFile::open(folder / "f").tensor("t");
  tensor.add_(1);
  CHECK(tensor.sum().item<float>() == 200);
  CHECK(read_bytes(folder / "f") == before);
  CHECK(SafetensorsFile::open(folder / "f").tensor("t").sum().item<float>() == 100);
}

TEST_CASE("replacing a file leaves the tensors of the old one", "[safetensors]") {
  const TempFolder folder;
  save_safetensors(folder / "f", {{"t", at::ones({5000}, at::kFloat)}});
  const SafetensorsFile old = SafetensorsFile::open(folder / "f");
  save_safetensors(folder / "f", {{"t", at::zeros({1}, at::kFloat)}});
  CHECK(old.tensor("t").sum().item<float>() == 5000);
  CHECK(SafetensorsFile::open(folder / "f").tensor("t").numel() == 1);
  // Also a file's own tensors may go back into it.
  save_safetensors(folder / "f", {{"t", old.tensor("t")}});
  CHECK(SafetensorsFile::open(folder / "f").tensor("t").sum().item<float>() == 5000);
}

TEST_CASE("a failed save leaves the old file and no other", "[safetensors]") {
  const TempFolder folder;
  save_safetensors(folder / "f", {{"t", at::ones({4}, at::kFloat)}});
  const std::string before = read_bytes(folder / "f");
  const auto text = [&](const Tensors& tensors, ErrorKind kind = ErrorKind::kBadInput) {
    return error_text([&] { save_safetensors(folder / "f", tensors); }, kind);
  };
  CHECK(contains(text({{"z", at::zeros({2}, at::kComplexFloat)}}),
                 "tensor \"z\": cannot be written"));
  CHECK(contains(text({{"m", at::empty({2}, at::TensorOptions(at::kMeta))}}), "has no data"));
  CHECK(contains(text({{"s", at::ones({2}).to_sparse()}}), "sparse"));
  CHECK(contains(text({{"__metadata__", at::ones({2})}}), "reserves its name"));
  CHECK(contains(text({{"\xff", at::ones({2})}}), "not valid UTF-8"));
  CHECK(contains(text({{"u", at::Tensor()}}, ErrorKind::kInternal), "tensor \"u\""));
  CHECK(contains(error_text([&] { save_safetensors(folder / "no/f", {}); }), "No such file"));
  CHECK(read_bytes(folder / "f") == before);
  CHECK(folder.file_count() == 1);
}

TEST_CASE("a streamed file is the plain one, with one tensor in memory at a time",
          "[safetensors]") {
  const TempFolder folder;
  int alive = 0;
  std::map<std::string, SafetensorsSource> sources;
  Tensors tensors;
  for (const char* name : {"a", "b", "c"}) {
    const at::Tensor values = random_bits(name[0] == 'b' ? at::kDouble : at::kHalf, {3, 5});
    tensors[name] = values;
    sources[name] = {values.scalar_type(), {3, 5}, [&alive, values] {
                       REQUIRE(alive++ == 0);
                       return at::from_blob(
                           values.mutable_data_ptr(), values.sizes(), [&](void*) { --alive; },
                           values.options());
                     }};
  }
  stream_safetensors(folder / "streamed", sources, {{"format", "pt"}});
  save_safetensors(folder / "plain", tensors, {{"format", "pt"}});
  CHECK(alive == 0);
  CHECK(read_bytes(folder / "streamed") == read_bytes(folder / "plain"));

  sources["b"].shape = {5, 3};
  const auto stream = [&] { stream_safetensors(folder / "plain", sources); };
  CHECK(contains(error_text(stream, ErrorKind::kInternal), "\"b\" was made as Double [3, 5]"));
  sources["b"].make = []() -> at::Tensor { bad_input("no rows"); };
  CHECK(error_text(stream) == "no rows");
  CHECK(read_bytes(folder / "streamed") == read_bytes(folder / "plain"));
  CHECK(folder.file_count() == 2);
  CHECK(safetensors_scalar_type("BF16") == at::kBFloat16);
  CHECK(contains(error_text([] { safetensors_scalar_type("U64"); }), "dtype \"U64\""));
}

TEST_CASE("what is no file, or too short for one, is refused", "[safetensors]") {
  const TempFolder folder;
  CHECK(contains(open_error(folder / "missing"), "No such file"));
  CHECK(contains(open_error(folder / "missing"), (folder / "missing").string()));
  CHECK(contains(open_error(folder.path()), "not a regular file"));
  REQUIRE(::mkfifo((folder / "pipe").c_str(), 0600) == 0);
  CHECK(contains(open_error(folder / "pipe"), "not a regular file"));
  for (const size_t size : {0, 1, 7}) {
    write_bytes(folder / "f", std::string(size, '\0'));
    CHECK(contains(open_error(folder / "f"), fmt::format("has {} bytes", size)));
  }
}

TEST_CASE("bad header lengths are refused", "[safetensors]") {
  const TempFolder folder;
  const auto text = [&](uint64_t length, std::string_view rest) {
    write_bytes(folder / "f", std::string(reinterpret_cast<const char*>(&length), 8).append(rest));
    return open_error(folder / "f");
  };
  CHECK(contains(text(100'000'001, "{}"), "oversize header: 100000001 bytes"));
  CHECK(contains(text(std::numeric_limits<uint64_t>::max(), "{}"), "oversize header"));
  CHECK(contains(text(100'000'000, "{}"), "the header has 100000000 bytes, but only 2 follow"));
  CHECK(contains(text(3, "{}"), "but only 2 follow"));
  CHECK(contains(text(0, ""), "does not begin with '{'"));
  CHECK(contains(text(3, " {}"), "does not begin with '{'"));
}

TEST_CASE("headers that are no strict JSON are refused", "[safetensors]") {
  CHECK(contains(header_error("{nonsense}"), "header (from byte 8): not valid at byte 2"));
  CHECK(contains(header_error("{}]"), "not valid at byte 2"));
  CHECK(contains(header_error(std::string_view("{}\0", 3)), "NUL"));
  CHECK(contains(header_error("{\"\xff\":1}"), "not valid"));
  CHECK(contains(header_error(R"({"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                              R"("t":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})"),
                 "\"t\" occurs twice"));
  CHECK(contains(header_error(R"({"t":[]})"), "t: expected an object"));
  CHECK(contains(header_error(R"({"t":{"shape":[2],"data_offsets":[0,8]}})"),
                 "t: the key \"dtype\" is missing"));
  CHECK(contains(header_error(R"({"t":{"dtype":"F32","data_offsets":[0,8]}})"),
                 "\"shape\" is missing"));
  CHECK(contains(header_error(R"({"t":{"dtype":"F32","shape":[2]}})"),
                 "\"data_offsets\" is missing"));
  CHECK(contains(header_error(R"({"t":{"dtype":7,"shape":[2],"data_offsets":[0,8]}})"), "t.dtype"));
  CHECK(
      contains(header_error(R"({"t":{"dtype":"F32","shape":2,"data_offsets":[0,8]}})"), "t.shape"));
  CHECK(contains(header_error(R"({"t":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})"),
                 "t.shape[0]: expected an integer"));
  CHECK(contains(header_error(R"({"__metadata__":{"a":1}})", 0),
                 "__metadata__.a: expected a string"));
  CHECK(contains(header_error(R"({"__metadata__":[]})", 0), "__metadata__: expected an object"));
}

TEST_CASE("wrong dtypes and shapes are refused with the tensor's name", "[safetensors]") {
  const auto text = [](std::string_view dtype, std::string_view shape) {
    const std::string error = header_error(fmt::format(
        R"({{"w.x":{{"dtype":"{}","shape":[{}],"data_offsets":[0,8]}}}})", dtype, shape));
    CHECK(contains(error, "tensor \"w.x\": "));
    return error;
  };
  CHECK(contains(text("F33", "2"), "unknown dtype \"F33\""));
  CHECK(contains(text("f32", "2"), "unknown dtype"));
  CHECK(contains(text("F32", "-2,-1"), "negative size -2"));
  CHECK(contains(text("F32", "3"), "F32 [3] takes 12 bytes, but its data_offsets hold 8"));
  CHECK(contains(text("F32", "0"), "takes 0 bytes"));
  CHECK(contains(text("F32", ""), "takes 4 bytes"));
  CHECK(contains(text("F32", "4294967296,4294967296"), "overflows"));
  CHECK(contains(text("F32", "4611686018427387906"), "overflows"));
  CHECK(contains(text("F32", "4294967296,4294967296,0"), "overflows"));
  CHECK(contains(text("F4", "15"), "do not fill whole bytes"));
  std::string ones = "2";
  for (int i = 0; i < 64; ++i) ones += ",1";
  CHECK(contains(text("F32", ones), "65 dimensions"));
}

TEST_CASE("wrong offsets are refused with the tensor's name", "[safetensors]") {
  const auto text = [](std::string_view first, std::string_view second, size_t data_size) {
    return header_error(fmt::format(R"({{"a":{{"dtype":"U8","shape":[4],"data_offsets":[{}]}},)"
                                    R"("b":{{"dtype":"U8","shape":[4],"data_offsets":[{}]}}}})",
                                    first, second),
                        data_size);
  };
  CHECK(contains(text("0,4", "4,8", 7), "tensor \"b\": its data ends at byte 8 of the data, but"));
  CHECK(contains(text("0,4", "9000000000,9000000004", 8), "truncated"));
  CHECK(contains(text("0,4", "2,6", 6), "tensor \"b\": its data at byte 2 overlaps"));
  CHECK(contains(text("0,4", "0,4", 4), "tensor \"b\": its data at byte 0 overlaps"));
  CHECK(contains(text("0,4", "5,9", 9), "tensor \"b\": its data begins at byte 5"));
  CHECK(contains(text("1,5", "5,9", 9), "tensor \"a\": its data begins at byte 1"));
  CHECK(contains(text("0,4", "4,8", 9), "1 trailing bytes"));
  CHECK(contains(text("4,0", "4,8", 8), "tensor \"a\": data_offsets [4,0]"));
  CHECK(contains(text("-4,0", "4,8", 8), "tensor \"a\": data_offsets [-4,0]"));
  CHECK(contains(text("0,4,8", "4,8", 8), "tensor \"a\": data_offsets [0,4,8]"));
  CHECK(
      contains(text("0,18446744073709551615", "4,8", 8), "a.data_offsets[1]: expected an integer"));
  CHECK(contains(header_error("{}", 3), "3 trailing bytes"));
}

TEST_CASE("every truncation of a valid file is refused", "[safetensors]") {
  const TempFolder folder;
  save_safetensors(folder / "f",
                   {{"a", at::ones({3}, at::kFloat)}, {"b", at::ones({2}, at::kByte)}});
  const std::string whole = read_bytes(folder / "f");
  for (size_t size = 0; size < whole.size(); ++size) {
    write_bytes(folder / "g", std::string_view(whole).substr(0, size));
    CHECK(contains(open_error(folder / "g"), (folder / "g").string()));
  }
}

TEST_CASE("errors of single tensors: missing, unsupported dtype, bad BOOL", "[safetensors]") {
  const TempFolder folder;
  write_bytes(folder / "f", file_bytes(R"({"u":{"dtype":"U16","shape":[1],"data_offsets":[0,2]},)"
                                       R"("b":{"dtype":"BOOL","shape":[3],"data_offsets":[2,5]},)"
                                       R"("i":{"dtype":"U8","shape":[1],"data_offsets":[5,6]}})",
                                       std::string_view("\0\0\1\0\2\5", 6)));
  const SafetensorsFile file = SafetensorsFile::open(folder / "f");
  const auto text = [&](const char* name) { return error_text([&] { file.tensor(name); }); };
  CHECK(contains(text("x"),
                 "tensor \"x\": not in the file, which holds 3 tensors: \"b\", \"i\", \"u\""));
  CHECK(contains(text("__metadata__"), "not in the file"));
  CHECK(contains(text("u"), "tensor \"u\": dtype U16 is not supported; expected one of F64"));
  CHECK(contains(text("b"), "tensor \"b\": a BOOL is 2 (element 2)"));
  CHECK(file.tensor("i").item<int>() == 5);  // the rest of the file is of use
}

// One or two bytes change (mostly of the header, where the structure is; often a digit to another,
// which leaves valid JSON), and the length at times.
std::string damaged(const std::string& valid, size_t header_end, std::mt19937& random) {
  std::string bytes = valid;
  const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
  for (size_t flips = 1 + below(2); flips > 0; --flips) {
    const size_t at = below(below(3) == 0 ? bytes.size() : header_end);
    constexpr std::string_view kTelling("0123456789-,:[]{}\"\\ eE.\0\xff", 25);
    switch (below(3)) {
      case 0:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(8)));
        break;
      case 1:
        bytes[at] = kTelling[below(kTelling.size())];
        break;
      default:
        if (const size_t digit = bytes.find_first_of("0123456789", at); digit < header_end) {
          bytes[digit] = static_cast<char>('0' + below(10));
        }
    }
  }
  if (below(8) == 0) bytes.resize(below(bytes.size() + 1));
  if (below(16) == 0) bytes.append(below(20), static_cast<char>(below(256)));
  return bytes;
}

TEST_CASE("a damaged file opens or is refused, but never crashes", "[safetensors]") {
  const TempFolder folder;
  save_safetensors(folder / "f",
                   {{"f", at::ones({2, 3}, at::kFloat)},
                    {"e", at::ones({0, 7}, at::kHalf)},
                    {"s", at::ones({}, at::kDouble)},
                    {"b", at::ones({5}, at::kBool)}},
                   {{"format", "pt"}});
  const std::string valid = read_bytes(folder / "f");
  uint64_t header = 0;
  std::memcpy(&header, valid.data(), 8);
  int opened = 0;
  int refused = 0;
  for (unsigned seed = 0; seed < 2000; ++seed) {
    INFO("seed " << seed);
    std::mt19937 random(seed);
    write_bytes(folder / "g", damaged(valid, 8 + header, random));
    try {
      const SafetensorsFile file = SafetensorsFile::open(folder / "g");
      ++opened;
      for (const SafetensorsEntry& entry : file.entries()) file.tensor(entry.name).clone();
    } catch (const Error& error) {
      ++refused;
      REQUIRE(error.kind() == ErrorKind::kBadInput);
      REQUIRE(contains(error.what(), (folder / "g").string()));
    }
  }
  CHECK(opened > 50);  // else the damage would be too coarse to test the reader behind the parser
  CHECK(refused > 500);
}

}  // namespace
}  // namespace shardproof
