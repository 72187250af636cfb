// A made-up source tree in a temporary folder: the structure tests must be seen to fail on it.
#pragma once
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "base/error.h"

namespace shardproof::structure {

class TempTree {
 public:
  TempTree() {
    std::string name =
        (std::filesystem::temp_directory_path() / "shardproof_structure_XXXXXX").string();
    if (!mkdtemp(name.data())) internal_error("cannot make a temporary folder like {}", name);
    root_ = name;
  }
  ~TempTree() {
    std::error_code ignored;
    std::filesystem::remove_all(root_, ignored);
  }
  TempTree(const TempTree&) = delete;
  TempTree& operator=(const TempTree&) = delete;

  TempTree& write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path, std::ios::binary) << text;
    return *this;
  }

  const std::filesystem::path& root() const { return root_; }

 private:
  std::filesystem::path root_;
};

}  // namespace shardproof::structure
