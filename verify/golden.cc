#include "verify/golden.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/json_file.h"
#include "io/safetensors.h"
#include "verify/golden_problems.h"

namespace shardproof::verify {
namespace {

namespace fs = std::filesystem;

constexpr char kCase[] = "case.json";
constexpr char kInputs[] = "inputs.safetensors";
constexpr char kExpected[] = "expected.safetensors";
constexpr char kAttention[] = "attention";
constexpr std::array<std::string_view, 4> kKinds = {kAttention, "model", "sampler", "grpo"};
constexpr double kLossTolerance = 1e-9;  // the stored values are rounded from extended precision

std::string read_kind(const JsonValue& record) {
  const JsonValue kind = record.at("kind");
  std::string text = kind.as_string();
  if (std::find(kKinds.begin(), kKinds.end(), text) == kKinds.end()) {
    kind.fail(fmt::format("unknown kind {}; expected one of: {}", json_quoted(text),
                          fmt::join(kKinds, ", ")));
  }
  return text;
}

std::string index_text(const at::Tensor& tensor, int64_t flat) {
  std::vector<int64_t> index(static_cast<size_t>(tensor.dim()));
  for (int64_t d = tensor.dim() - 1; d >= 0; --d) {
    index[static_cast<size_t>(d)] = flat % tensor.size(d);
    flat /= tensor.size(d);
  }
  return fmt::format("[{}]", fmt::join(index, ","));
}

using Problems = GoldenProblems;
using Shape = std::vector<int64_t>;
// A size that another problem hides; any will do, so as not to report the consequences too.
constexpr int64_t kUnknown = -1;

bool fits(const Shape& shape, const Shape& expected) {
  return std::equal(
      shape.begin(), shape.end(), expected.begin(), expected.end(),
      [](int64_t size, int64_t wanted) { return wanted == kUnknown || size == wanted; });
}

std::string shape_text(const Shape& shape) {
  std::vector<std::string> sizes;
  for (const int64_t size : shape) {
    sizes.push_back(size == kUnknown ? std::string("?") : std::to_string(size));
  }
  return fmt::format("[{}]", fmt::join(sizes, ","));
}

// One of the folder's tensor files; a file that cannot be opened is one problem, not one a tensor.
class TensorFile {
 public:
  TensorFile(const fs::path& folder, const char* name, Problems& problems)
      : name_(name), problems_(problems) {
    problems_.attempt([&] { file_ = SafetensorsFile::open(folder / name); });
  }

  bool is_open() const { return file_.has_value(); }
  bool contains(const char* tensor) const { return file_ && file_->contains(tensor); }
  // The shape of a 4-dimensional tensor, else four unknown sizes.
  Shape shape4(const char* tensor) const {
    Shape unknown(4, kUnknown);
    if (!contains(tensor)) return unknown;
    const Shape& shape = file_->entry(tensor).shape;
    return shape.size() == 4 ? shape : unknown;
  }
  // Undefined after a problem.
  at::Tensor take(const char* tensor, const char* dtype, const Shape& shape) {
    if (!file_) return {};
    if (!file_->contains(tensor)) {
      complain(tensor, "is missing");
      return {};
    }
    const SafetensorsEntry& entry = file_->entry(tensor);
    if (entry.dtype != dtype) {
      complain(tensor, fmt::format("has dtype {}; expected {}", entry.dtype, dtype));
    }
    if (!fits(entry.shape, shape)) {
      complain(tensor, fmt::format("has shape {}; expected {}", shape_text(entry.shape),
                                   shape_text(shape)));
    }
    if (entry.dtype != dtype || !fits(entry.shape, shape)) return {};
    at::Tensor values;
    problems_.attempt([&] { values = file_->tensor(tensor); });
    return values;
  }
  at::Tensor take_finite(const char* tensor, const char* dtype, const Shape& shape) {
    const at::Tensor values = take(tensor, dtype, shape);
    const bool good = values.defined() && require(tensor, values, at::isfinite(values), "finite");
    return good ? values : at::Tensor();
  }
  // `good`: bool, of the shape of `values`.
  bool require(const char* tensor, const at::Tensor& values, const at::Tensor& good,
               const char* what) {
    const at::Tensor bad = at::nonzero(good.flatten().logical_not()).flatten();
    if (bad.numel() == 0) return true;
    const auto first = bad[0].item<int64_t>();
    complain(tensor,
             fmt::format("has {} of {} values that are not {}, the first is {} at {}", bad.numel(),
                         values.numel(), what, values.flatten()[first].item<double>(),
                         index_text(values, first)));
    return false;
  }
  void complain(const char* tensor, std::string_view problem) {
    problems_.add(fmt::format("{}: tensor \"{}\" {}", name_, tensor, problem));
  }

 private:
  const char* name_;
  Problems& problems_;
  std::optional<SafetensorsFile> file_;
};

void read_size(const JsonValue& record, const char* key, int64_t& size, Problems& problems) {
  problems.attempt([&] {
    const JsonValue value = record.at(key);
    const int64_t number = value.as_integer();
    if (number < 1) value.fail(fmt::format("expected a positive number, found {}", number));
    size = number;
  });
}

double read_scale(const JsonValue& record, int64_t head_dim) {
  const JsonValue scale = record.at("scale");
  if (scale.is_number() && scale.as_number() > 0) return scale.as_number();
  if (scale.is_string() && scale.as_string() == "1/sqrt(D)") {
    return 1.0 / std::sqrt(static_cast<double>(head_dim));
  }
  scale.fail("expected \"1/sqrt(D)\" or a positive number");
}

int64_t read_text_tokens(const JsonValue& record, int64_t tokens) {
  const std::optional<JsonValue> text = record.find("text");
  if (!text) return 0;
  const int64_t count = text->as_integer();
  if (count < 0 || count > tokens) {
    text->fail(fmt::format("expected 0 to {} (tokens), found {}", tokens, count));
  }
  if (const auto image = record.find("image"); image && image->as_integer() != tokens - count) {
    image->fail(
        fmt::format("expected tokens - text = {}, found {}", tokens - count, image->as_integer()));
  }
  if (const auto order = record.find("order"); order && order->as_string() != "text, image") {
    order->fail("expected \"text, image\"");
  }
  return count;
}

void read_case(AttentionGolden& golden, Problems& problems) {
  std::optional<JsonValue> record;
  std::string kind;
  problems.attempt([&] {
    record = read_json_file(golden.folder / kCase);
    kind = read_kind(*record);
  });
  if (kind.empty()) return;  // the other keys of something else would only be noise
  if (kind != kAttention) {
    bad_input("golden {} is of kind \"{}\"; expected \"{}\"", golden.folder.string(), kind,
              kAttention);
  }
  read_size(*record, "batch", golden.batch, problems);
  read_size(*record, "tokens", golden.tokens, problems);
  read_size(*record, "heads", golden.heads, problems);
  read_size(*record, "head_dim", golden.head_dim, problems);
  if (record->find("kv_heads")) read_size(*record, "kv_heads", golden.kv_heads, problems);
  problems.attempt([&] { golden.scale = read_scale(*record, golden.head_dim); });
  if (golden.tokens == kUnknown) return;
  problems.attempt([&] { golden.text_tokens = read_text_tokens(*record, golden.tokens); });
}

// Where case.json is silent or broken, q and k say the sizes. It need not state the KV heads.
void settle_sizes(AttentionGolden& golden, const TensorFile& inputs, Problems& problems) {
  const Shape query = inputs.shape4("q");
  if (golden.batch == kUnknown) golden.batch = query[0];
  if (golden.tokens == kUnknown) golden.tokens = query[1];
  if (golden.heads == kUnknown) golden.heads = query[2];
  if (golden.head_dim == kUnknown) golden.head_dim = query[3];
  if (golden.kv_heads == kUnknown) golden.kv_heads = inputs.shape4("k")[2];
  if (golden.heads == kUnknown || golden.kv_heads == kUnknown) return;
  if (golden.kv_heads == 0 || golden.heads % golden.kv_heads != 0) {
    problems.add(
        fmt::format("{} KV heads do not divide the {} query heads", golden.kv_heads, golden.heads));
  }
}

void read_inputs(AttentionGolden& golden, TensorFile& file) {
  const Shape query = {golden.batch, golden.tokens, golden.heads, golden.head_dim};
  const Shape key = {golden.batch, golden.tokens, golden.kv_heads, golden.head_dim};
  golden.q = file.take_finite("q", "F32", query);
  golden.k = file.take_finite("k", "F32", key);
  golden.v = file.take_finite("v", "F32", key);
  golden.cotangent = file.take_finite("cotangent", "F32", query);
  if (file.contains("mask")) golden.mask = file.take("mask", "BOOL", {golden.batch, golden.tokens});
}

// -inf where, and only where, a query sees no key: 0, as some kernels say there, is wrong. A mask
// that cannot be read, which is reported elsewhere, might have excused any -inf.
void require_lse(const AttentionGolden& golden, const TensorFile& inputs, TensorFile& file) {
  if (!golden.lse.defined()) return;
  if (golden.mask.defined() && golden.mask.size(0) != golden.lse.size(0)) return;  // sizes unknown
  at::Tensor good = at::isfinite(golden.lse);
  if (golden.mask.defined()) {
    const at::Tensor no_key = golden.mask.any(1).logical_not().view({-1, 1, 1});  // [B,1,1]
    good = at::where(no_key, at::isneginf(golden.lse), good);
  } else if (!inputs.is_open() || inputs.contains("mask")) {
    good = good.logical_or(at::isneginf(golden.lse));
  }
  file.require("lse", golden.lse, good, "finite (-inf for queries without a valid key)");
}

void read_expected(AttentionGolden& golden, const TensorFile& inputs, TensorFile& file) {
  const Shape query = {golden.batch, golden.tokens, golden.heads, golden.head_dim};
  const Shape key = {golden.batch, golden.tokens, golden.kv_heads, golden.head_dim};
  golden.out = file.take_finite("out", "F64", query);
  golden.lse = file.take("lse", "F64", {golden.batch, golden.heads, golden.tokens});
  require_lse(golden, inputs, file);
  golden.dq = file.take_finite("dq", "F64", query);
  golden.dk = file.take_finite("dk", "F64", key);
  golden.dv = file.take_finite("dv", "F64", key);
}

void settle_loss(AttentionGolden& golden, TensorFile& file) {
  at::Tensor stored;
  if (file.contains("loss")) stored = file.take_finite("loss", "F64", {});
  if (!golden.out.defined() || !golden.cotangent.defined() ||
      golden.out.sizes() != golden.cotangent.sizes()) {
    return;
  }
  golden.loss = (golden.out * golden.cotangent.to(at::kDouble)).sum().item<double>();
  if (!stored.defined()) return;
  const double loss = stored.item<double>();
  const double limit = kLossTolerance * std::max(1.0, std::abs(golden.loss));
  if (!std::isfinite(golden.loss) || std::abs(loss - golden.loss) > limit) {
    file.complain("loss", fmt::format("is {}, but sum(out * cotangent) is {}", loss, golden.loss));
  }
  golden.loss = loss;
}

}  // namespace

bool is_golden_folder(const fs::path& path) {
  std::error_code ignored;
  return fs::is_directory(path, ignored) &&
         (fs::exists(path / kCase, ignored) || fs::exists(path / kInputs, ignored) ||
          fs::exists(path / kExpected, ignored));
}

std::vector<fs::path> find_goldens(const fs::path& path) {
  if (is_golden_folder(path)) return {path};
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator entry(path, error), end; !error && entry != end;
       entry.increment(error)) {
    if (is_golden_folder(entry->path())) found.push_back(entry->path());
  }
  if (error) bad_input("cannot look for goldens in {}: {}", path.string(), error.message());
  if (found.empty()) {
    bad_input("no golden in {}: expected a folder with {}, {} and {}, or a folder of such folders",
              path.string(), kCase, kInputs, kExpected);
  }
  std::sort(found.begin(), found.end());
  return found;
}

std::string golden_kind(const fs::path& folder) {
  return read_kind(read_json_file(folder / kCase));
}

AttentionGolden load_attention_golden(const fs::path& folder) {
  if (!is_golden_folder(folder)) {
    bad_input("{} is not a golden: expected a folder with {}, {} and {}", folder.string(), kCase,
              kInputs, kExpected);
  }
  AttentionGolden golden{};
  golden.folder = fs::canonical(folder);
  golden.name = golden.folder.filename().string();
  golden.batch = golden.tokens = golden.heads = golden.kv_heads = golden.head_dim = kUnknown;

  Problems problems;
  read_case(golden, problems);
  TensorFile inputs(golden.folder, kInputs, problems);
  settle_sizes(golden, inputs, problems);
  read_inputs(golden, inputs);
  TensorFile expected(golden.folder, kExpected, problems);
  read_expected(golden, inputs, expected);
  settle_loss(golden, expected);
  problems.raise_if_any(golden.folder);
  return golden;
}

}  // namespace shardproof::verify
