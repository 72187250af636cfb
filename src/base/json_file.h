// Strict reading of JSON (RFC 8259), with errors that a user can act on: each names the file and
// the byte or the key path. Stricter than nlohmann's own parser: a key that an object has twice,
// nesting deeper than 128 levels and files above a size limit are errors. Errors are of kind
// kBadInput.
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace shardproof {

// A value inside a JSON document that knows where it is: "mesh.dp" of "capture.json". A cheap copy;
// it keeps the whole document alive. The as_... functions throw where the type is another one.
class JsonValue {
 public:
  JsonValue(std::shared_ptr<const nlohmann::json> document, std::string source);

  // A member of an object. `at` throws where the key is missing; both where this is no object.
  JsonValue at(std::string_view key) const;
  std::optional<JsonValue> find(std::string_view key) const;
  std::vector<std::pair<std::string, JsonValue>> members() const;  // of an object, by key
  std::vector<JsonValue> elements() const;                         // of an array, in order

  bool as_bool() const;
  int64_t as_integer() const;  // written without fraction or exponent, within int64
  double as_number() const;    // integers too; always finite
  std::string as_string() const;
  std::vector<int64_t> as_integers() const;  // an array of nothing else

  bool is_string() const;
  bool is_number() const;
  bool is_null() const;
  const nlohmann::json& raw() const { return *value_; }

  const std::string& source() const { return *source_; }  // the file, for messages
  std::string path() const;                               // "blocks[3].heads"; "" at the top
  // Throws "<file>: <path>: <problem>".
  [[noreturn]] void fail(std::string_view problem) const;

 private:
  JsonValue(const JsonValue& parent, const nlohmann::json& value, std::string path);

  std::shared_ptr<const nlohmann::json> document_;
  std::shared_ptr<const std::string> source_;
  const nlohmann::json* value_;
  std::string path_;
};

inline constexpr size_t kDefaultJsonLimit = size_t{64} << 20;  // bytes

// Errors: the file is missing, a folder, unreadable or larger than max_bytes, or no strict JSON.
JsonValue read_json_file(const std::filesystem::path& file, size_t max_bytes = kDefaultJsonLimit);
// `source` stands for the file in messages; byte positions count from 0 at the start of the text.
JsonValue parse_json(std::string_view text, const std::string& source);

// The text as a JSON string with its quotes, for names from files in messages: control characters
// are escaped, invalid UTF-8 is replaced, and what is longer than `longest` bytes is cut.
std::string json_quoted(std::string_view text, size_t longest = 200);

}  // namespace shardproof
