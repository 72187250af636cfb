#include "base/json_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/error.h"

namespace shardproof {
namespace {

using nlohmann::json;

constexpr size_t kDeepest = 128;  // copies and dumps of a document recurse

// Messages of the parser quote the input, which may be binary or hundreds of megabytes.
std::string printable(std::string text) {
  constexpr size_t kLongest = 300;
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "...";
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c > 0x7e; }, '?');
  return text;
}

std::string member_path(const std::string& parent, std::string_view key) {
  return parent.empty() ? std::string(key) : fmt::format("{}.{}", parent, key);
}

// An iterator that publishes how far the parser has read; nlohmann's SAX events carry no position.
class TrackedIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  TrackedIterator(const char* at, const char** furthest) : at_(at), furthest_(furthest) {}
  reference operator*() const { return *at_; }
  TrackedIterator& operator++() {
    *furthest_ = ++at_;
    return *this;
  }
  bool operator==(const TrackedIterator& other) const { return at_ == other.at_; }
  bool operator!=(const TrackedIterator& other) const { return at_ != other.at_; }

 private:
  const char* at_;
  const char** furthest_;
};

// Builds the document from the parser's events and stops at the first thing that is not strict.
class StrictBuilder final : public nlohmann::json_sax<json> {
 public:
  json take() { return std::move(root_); }
  const std::string& problem() const { return problem_; }
  std::optional<size_t> problem_position() const { return problem_position_; }

  bool null() override { return put(nullptr); }
  bool boolean(bool value) override { return put(value); }
  bool number_integer(number_integer_t value) override { return put(value); }
  bool number_unsigned(number_unsigned_t value) override { return put(value); }
  bool number_float(number_float_t value, const string_t&) override { return put(value); }
  bool string(string_t& value) override { return put(std::move(value)); }
  bool binary(binary_t&) override { return stop("binary values are not JSON"); }
  bool start_object(size_t) override { return open(json::object()); }
  bool start_array(size_t) override { return open(json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    Level& level = levels_.back();
    auto& members = level.value->get_ref<json::object_t&>();
    const auto [slot, is_new] = members.emplace(name, nullptr);
    level.slot = &slot->second;
    level.key = name;
    return is_new ||
           stop(fmt::format("the key {} occurs twice; keep one of them", json_quoted(path())));
  }

  bool parse_error(size_t position, const std::string&, const json::exception& error) override {
    const std::string text = error.what();  // "[json.exception.parse_error.101] parse error at ..."
    const size_t prefix = text.find("] ");
    problem_ = printable(prefix == std::string::npos ? text : text.substr(prefix + 2));
    problem_position_ = position == 0 ? 0 : position - 1;  // counts the bytes read
    return false;
  }

 private:
  struct Level {
    json* value;      // the open object or array
    json* slot;       // object: where the value of the last key goes
    std::string key;  // object: the last key
  };

  bool put(json value) {
    place(std::move(value));
    return true;
  }
  json* place(json value) {
    if (levels_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    Level& level = levels_.back();
    if (level.value->is_array()) {
      level.value->push_back(std::move(value));
      return &level.value->back();
    }
    *level.slot = std::move(value);
    return level.slot;
  }
  bool open(json container) {
    if (levels_.size() == kDeepest) {
      return stop(fmt::format("nested deeper than {} levels", kDeepest));
    }
    levels_.push_back({place(std::move(container)), nullptr, {}});
    return true;
  }
  bool close() {
    levels_.pop_back();
    return true;
  }
  bool stop(std::string problem) {
    problem_ = std::move(problem);
    return false;
  }
  std::string path() const {
    std::string text;
    for (const Level& level : levels_) {
      text = level.value->is_array() ? fmt::format("{}[{}]", text, level.value->size() - 1)
                                     : member_path(text, level.key);
    }
    return text;
  }

  json root_;
  std::vector<Level> levels_;
  std::string problem_;
  std::optional<size_t> problem_position_;
};

std::string describe(const json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return "an array";
  if (value.is_string()) {
    return fmt::format("the string {}", json_quoted(value.get_ref<const std::string&>(), 60));
  }
  return value.dump();
}

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int number() const { return number_; }

 private:
  int number_;
};

// Pipes are welcome (a shell's process substitution), so the size is not asked for beforehand.
std::string read_whole_file(const std::string& file, size_t max_bytes) {
  const Descriptor in(::open(file.c_str(), O_RDONLY | O_CLOEXEC));
  if (in.number() < 0) {
    bad_input("cannot read {}: {}. Check the path and its permissions", file, std::strerror(errno));
  }
  std::string bytes;
  std::vector<char> piece(size_t{1} << 16);
  while (true) {
    const ssize_t count = ::read(in.number(), piece.data(), piece.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      bad_input("cannot read {}: {}. A JSON file is expected there", file, std::strerror(errno));
    }
    if (count == 0) return bytes;
    bytes.append(piece.data(), static_cast<size_t>(count));
    if (bytes.size() > max_bytes) {
      bad_input("{} is larger than the limit of {} bytes for this JSON file; is it the right file?",
                file, max_bytes);
    }
  }
}

}  // namespace

JsonValue::JsonValue(std::shared_ptr<const json> document, std::string source)
    : document_(std::move(document)),
      source_(std::make_shared<const std::string>(std::move(source))),
      value_(document_.get()) {}

JsonValue::JsonValue(const JsonValue& parent, const json& value, std::string path)
    : document_(parent.document_),
      source_(parent.source_),
      value_(&value),
      path_(std::move(path)) {}

std::optional<JsonValue> JsonValue::find(std::string_view key) const {
  if (!value_->is_object()) fail(fmt::format("expected an object, found {}", describe(*value_)));
  const auto found = value_->find(std::string(key));
  if (found == value_->end()) return std::nullopt;
  return JsonValue(*this, *found, member_path(path_, key));
}

JsonValue JsonValue::at(std::string_view key) const {
  std::optional<JsonValue> found = find(key);
  if (!found) fail(fmt::format("the key {} is missing", json_quoted(key)));
  return *std::move(found);
}

std::vector<std::pair<std::string, JsonValue>> JsonValue::members() const {
  if (!value_->is_object()) fail(fmt::format("expected an object, found {}", describe(*value_)));
  std::vector<std::pair<std::string, JsonValue>> all;
  for (const auto& [key, value] : value_->items()) {
    all.emplace_back(key, JsonValue(*this, value, member_path(path_, key)));
  }
  return all;
}

std::vector<JsonValue> JsonValue::elements() const {
  if (!value_->is_array()) fail(fmt::format("expected an array, found {}", describe(*value_)));
  std::vector<JsonValue> all;
  for (size_t i = 0; i < value_->size(); ++i) {
    all.push_back(JsonValue(*this, (*value_)[i], fmt::format("{}[{}]", path_, i)));
  }
  return all;
}

bool JsonValue::as_bool() const {
  if (!value_->is_boolean()) {
    fail(fmt::format("expected true or false, found {}", describe(*value_)));
  }
  return value_->get<bool>();
}

int64_t JsonValue::as_integer() const {
  if (!value_->is_number_integer()) {
    fail(fmt::format("expected an integer, found {}", describe(*value_)));
  }
  constexpr uint64_t kLargest = std::numeric_limits<int64_t>::max();
  if (value_->is_number_unsigned() && value_->get<uint64_t>() > kLargest) {
    fail(fmt::format("expected an integer up to {}, found {}", kLargest, describe(*value_)));
  }
  return value_->get<int64_t>();
}

double JsonValue::as_number() const {
  if (!value_->is_number()) fail(fmt::format("expected a number, found {}", describe(*value_)));
  return value_->get<double>();
}

std::string JsonValue::as_string() const {
  if (!value_->is_string()) fail(fmt::format("expected a string, found {}", describe(*value_)));
  return value_->get<std::string>();
}

std::vector<int64_t> JsonValue::as_integers() const {
  std::vector<int64_t> numbers;
  for (const JsonValue& element : elements()) numbers.push_back(element.as_integer());
  return numbers;
}

bool JsonValue::is_string() const { return value_->is_string(); }
bool JsonValue::is_number() const { return value_->is_number(); }
bool JsonValue::is_null() const { return value_->is_null(); }

std::string JsonValue::path() const { return path_; }

void JsonValue::fail(std::string_view problem) const {
  if (path_.empty()) bad_input("{}: {}", source(), problem);
  const std::string quoted = json_quoted(path_);  // the path may hold control characters
  bad_input("{}: {}: {}", source(), quoted.substr(1, quoted.size() - 2), problem);
}

JsonValue parse_json(std::string_view text, const std::string& source) {
  // The parser takes a NUL byte for the end of the text and would ignore what follows it.
  if (const size_t nul = text.find('\0'); nul != std::string_view::npos) {
    bad_input("{}: not valid at byte {}: a NUL byte. Correct the file or write it anew", source,
              nul);
  }
  const char* furthest = text.data();
  StrictBuilder builder;
  const TrackedIterator begin(text.data(), &furthest);
  const TrackedIterator end(text.data() + text.size(), &furthest);
  if (!json::sax_parse(begin, end, &builder)) {
    const size_t read = static_cast<size_t>(furthest - text.data());
    bad_input("{}: not valid at byte {}: {}. Correct the file or write it anew", source,
              builder.problem_position().value_or(read), builder.problem());
  }
  return JsonValue(std::make_shared<const json>(builder.take()), source);
}

JsonValue read_json_file(const std::filesystem::path& file, size_t max_bytes) {
  return parse_json(read_whole_file(file.string(), max_bytes), file.string());
}

std::string json_quoted(std::string_view text, size_t longest) {
  std::string shown(text.substr(0, longest));
  if (text.size() > longest) shown += "...";
  return json(std::move(shown)).dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace shardproof
