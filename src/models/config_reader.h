// Reads a diffusers configuration, collecting all that is wrong with it into one error.
#pragma once
#include <set>
#include <string>
#include <vector>

#include "base/json_file.h"

namespace shardproof::models {

class ConfigReader {
 public:
  explicit ConfigReader(const JsonValue& config) : config_(config) {}

  // Values with diffusers' defaults for missing keys; null counts as missing.
  int64_t integer(const std::string& key, int64_t otherwise);
  bool boolean(const std::string& key, bool otherwise);
  std::string text(const std::string& key, const std::string& otherwise);
  std::vector<int64_t> integers(const std::string& key, std::vector<int64_t> otherwise);

  // The key may be missing, null, or have this value; anything else is not supported.
  template <class T>
  void only(const std::string& key, const T& value);
  void require(bool condition, const std::string& problem);

  // Throws one error (kBadInput) that lists all problems, unknown keys among them.
  void finish();

 private:
  template <class F>
  void read(const std::string& key, F take);

  const JsonValue& config_;
  std::set<std::string> known_ = {"_class_name", "_diffusers_version", "_name_or_path"};
  std::vector<std::string> problems_;
};

}  // namespace shardproof::models
