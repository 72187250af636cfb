#include "cli/run_support.h"

#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>

#include "base/error.h"

namespace shardproof::cli {

void check_outputs(const std::vector<std::string>& paths) {
  for (const std::string& path : paths) {
    if (path.empty()) continue;
    const auto folder = std::filesystem::absolute(path).parent_path();
    if (!std::filesystem::is_directory(folder)) {
      bad_input("cannot write {}: there is no folder {}", path, folder.string());
    }
  }
}

std::function<void(size_t, size_t)> progress_line(bool quiet) {
  if (quiet || !isatty(STDERR_FILENO)) return {};
  return [](size_t done, size_t all) {
    fmt::print(stderr, "\r{}", done == all ? "\033[K" : fmt::format("{}/{} cases", done, all));
  };
}

}  // namespace shardproof::cli
