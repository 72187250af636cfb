// What tests of files share: a folder that is gone after the test, bytes in and out of files, and
// the text of an expected error.
#pragma once
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>

#include "base/error.h"
#include "tests/catch.h"

namespace shardproof::tests {

// Unique by process and count, so that tests may run side by side and in any order.
class TempFolder {
 public:
  TempFolder() {
    static std::atomic<int> counter{0};
    path_ = std::filesystem::temp_directory_path() /
            fmt::format("shardproof-test-{}-{}", ::getpid(), counter++);
    std::filesystem::create_directories(path_);
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(std::string_view name) const { return path_ / name; }
  size_t file_count() const {
    return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(path_),
                                             std::filesystem::directory_iterator()));
  }

 private:
  std::filesystem::path path_;
};

inline std::string read_bytes(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  REQUIRE(in);
  return {std::istreambuf_iterator<char>(in), {}};
}

inline void write_bytes(const std::filesystem::path& file, std::string_view bytes) {
  std::error_code ignored;
  std::filesystem::remove(file, ignored);  // file systems flush a file that is cut and rewritten
  std::ofstream out(file, std::ios::binary);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  REQUIRE(out.flush());
}

inline bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

// The message of the Error that `action` must throw.
template <class Action>
std::string error_text(Action action, ErrorKind kind = ErrorKind::kBadInput) {
  try {
    action();
  } catch (const Error& error) {
    CHECK(static_cast<int>(error.kind()) == static_cast<int>(kind));
    return error.what();
  }
  FAIL("expected an Error, none was thrown");
  return {};
}

}  // namespace shardproof::tests
