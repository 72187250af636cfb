// The values that words of an option stand for.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "cli/nearest.h"

namespace shardproof::cli {

// Errors (kBadInput): a word that is not among them (names them and the nearest).
template <class Value>
Value choose(const char* option, const std::string& word,
             const std::vector<std::pair<std::string, Value>>& values) {
  std::vector<std::string> known;
  std::string expected;
  for (const auto& [name, value] : values) {
    if (word == name) return value;
    known.push_back(name);
    expected += (expected.empty() ? "" : ", ") + name;
  }
  const std::string near = nearest(word, known);
  bad_input("{} '{}'; expected {}{}", option, word, expected,
            near.empty() ? "" : " (did you mean " + near + "?)");
}

}  // namespace shardproof::cli
