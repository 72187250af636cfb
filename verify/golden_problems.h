// Gathers the problems of one golden folder, so that a broken golden is mended in one go.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "base/error.h"

namespace shardproof::verify {

class GoldenProblems {
 public:
  void add(std::string problem) { list_.push_back(std::move(problem)); }
  // Runs a step; an error of it becomes one of the problems.
  template <class Step>
  void attempt(Step step) {
    try {
      step();
    } catch (const Error& error) {
      add(error.what());
    }
  }
  bool empty() const { return list_.empty(); }
  void raise_if_any(const std::filesystem::path& folder) const {
    if (list_.empty()) return;
    bad_input("golden {} cannot be used, {} problem{}:\n  - {}\nRestore its files or make it anew",
              folder.string(), list_.size(), list_.size() == 1 ? "" : "s",
              fmt::join(list_, "\n  - "));
  }

 private:
  std::vector<std::string> list_;
};

}  // namespace shardproof::verify
