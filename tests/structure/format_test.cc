// Every C++ and CUDA file is formatted as .clang-format says.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <optional>
#include <regex>

#include "tests/catch.h"
#include "tests/structure/source_tree.h"
#include "tests/structure/temp_tree.h"

namespace shardproof::structure {
namespace {

// Other major versions break some lines elsewhere: only this one is held against the sources.
constexpr int kMajorVersion = 14;
constexpr std::size_t kFilesACall = 50;  // keeps the command line short

struct Run {
  int status = 0;
  std::string output;
};

Run run(const std::string& command) {
  std::FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  REQUIRE(pipe != nullptr);
  Run run;
  std::array<char, 4096> buffer;
  while (const std::size_t n = fread(buffer.data(), 1, buffer.size(), pipe)) {
    run.output.append(buffer.data(), n);
  }
  run.status = pclose(pipe);
  return run;
}

std::optional<int> clang_format_major() {
  const Run version = run("clang-format --version");
  std::smatch match;
  if (version.status != 0 ||
      !std::regex_search(version.output, match, std::regex(R"(version (\d+)\.)"))) {
    return {};
  }
  return std::stoi(match[1]);
}

// What clang-format objects to in the tree's C++ files.
std::string complaints(const std::filesystem::path& root) {
  std::vector<std::string> files = project_files(root);
  std::erase_if(files, [](const std::string& file) { return !is_source(file); });
  std::string all;
  for (std::size_t begin = 0; begin < files.size(); begin += kFilesACall) {
    std::string command = "clang-format --style=file --dry-run -Werror --ferror-limit=1";
    for (std::size_t i = begin; i < std::min(begin + kFilesACall, files.size()); ++i) {
      command += fmt::format(" '{}'", (root / files[i]).string());
    }
    const Run result = run(command);
    if (result.status != 0) all += result.output;
  }
  return all;
}

bool can_check() {
  const std::optional<int> major = clang_format_major();
  if (major == kMajorVersion) return true;
  const std::string reason =
      major ? fmt::format("clang-format is version {}, the sources are held to {}", *major,
                          kMajorVersion)
            : "no clang-format on PATH";
  WARN("skipped: " << reason);
  return false;
}

}  // namespace

TEST_CASE("the sources are formatted", "[structure][format]") {
  if (!can_check()) return;
  const std::string found = complaints(project_root());
  INFO(found << "run: clang-format -i FILE");
  REQUIRE(found.empty());
}

TEST_CASE("a file that is not formatted is found", "[structure][format]") {
  if (!can_check()) return;
  TempTree tree;
  tree.write(".clang-format", "BasedOnStyle: Google\n").write("src/good.cc", "int x;\n");
  REQUIRE(complaints(tree.root()).empty());
  tree.write("src/bad.cc", "int   x ;\n");
  REQUIRE(complaints(tree.root()).find("bad.cc") != std::string::npos);
}

}  // namespace shardproof::structure
