#include "models/config_reader.h"

#include <nlohmann/json.hpp>

#include "base/error.h"

namespace shardproof::models {

namespace {
// Of any count or size; beyond it the shapes of real files end and memory does.
constexpr int64_t kMost = 1 << 20;
}  // namespace

template <class F>
void ConfigReader::read(const std::string& key, F take) {
  known_.insert(key);
  const auto value = config_.find(key);
  if (!value || value->is_null()) return;
  try {
    take(*value);
  } catch (const Error& error) {
    problems_.push_back(error.what());
  }
}

int64_t ConfigReader::integer(const std::string& key, int64_t otherwise) {
  read(key, [&](const JsonValue& v) {
    otherwise = v.as_integer();
    require(otherwise > 0 && otherwise <= kMost,
            fmt::format("{} is {}; expected a positive number up to {}", key, otherwise, kMost));
  });
  return otherwise;
}

bool ConfigReader::boolean(const std::string& key, bool otherwise) {
  read(key, [&](const JsonValue& v) { otherwise = v.as_bool(); });
  return otherwise;
}

std::string ConfigReader::text(const std::string& key, const std::string& otherwise) {
  std::string value = otherwise;
  read(key, [&](const JsonValue& v) { value = v.as_string(); });
  return value;
}

std::vector<int64_t> ConfigReader::integers(const std::string& key,
                                            std::vector<int64_t> otherwise) {
  read(key, [&](const JsonValue& v) { otherwise = v.as_integers(); });
  return otherwise;
}

template <class T>
void ConfigReader::only(const std::string& key, const T& value) {
  read(key, [&](const JsonValue& v) {
    if (v.raw() == nlohmann::json(value)) return;
    problems_.push_back(fmt::format("{} is {}; only {} is supported", key, v.raw().dump(),
                                    nlohmann::json(value).dump()));
  });
}
template void ConfigReader::only(const std::string&, const bool&);
template void ConfigReader::only(const std::string&, const int64_t&);
template void ConfigReader::only(const std::string&, const double&);
template void ConfigReader::only(const std::string&, const std::string&);

void ConfigReader::require(bool condition, const std::string& problem) {
  if (!condition) problems_.push_back(problem);
}

void ConfigReader::finish() {
  for (const auto& [key, value] : config_.members()) {
    if (!known_.contains(key)) {
      problems_.push_back(fmt::format("{}: a key that this model does not know", json_quoted(key)));
    }
  }
  if (problems_.empty()) return;
  std::string text = fmt::format("{}: {} problem{} in the configuration", config_.source(),
                                 problems_.size(), problems_.size() == 1 ? "" : "s");
  for (const std::string& problem : problems_) text += "\n  - " + problem;
  throw Error(ErrorKind::kBadInput, text);
}

}  // namespace shardproof::models
