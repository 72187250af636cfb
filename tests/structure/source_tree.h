// Reads the project's own files for the structure tests. No LibTorch.
#pragma once
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace shardproof::structure {

struct SourceFile {
  std::string path;  // relative to the root, with '/'
  std::string text;
};

// What a rule objects to. `line` counts from 1; 0 is the file as a whole.
struct Finding {
  std::string file;
  int line = 0;
  std::string rule;
  std::string text;
};

// One finding a line, "src/a/b.h:12: [rule] text"; empty where there is none.
std::string to_string(const std::vector<Finding>& findings);

// The root of the checkout that is under test.
std::filesystem::path project_root();

// Paths relative to `root` of the files that git tracks or would track (untracked, not ignored),
// sorted. Where `root` is not the top of a git work tree (an unpacked archive): of all files
// outside hidden folders and build folders. Symbolic links are left out.
std::vector<std::string> project_files(const std::filesystem::path& root);

// The C++ and CUDA files below `folders`, sorted by path.
std::vector<SourceFile> read_sources(const std::filesystem::path& root,
                                     const std::vector<std::string>& folders);

// Every text file (without a NUL byte in its first 8 KiB).
std::vector<SourceFile> read_text_files(const std::filesystem::path& root);

bool is_header(std::string_view path);  // .h .hpp .cuh
bool is_source(std::string_view path);  // headers and .cc .cpp .cxx .c .cu

std::vector<std::string> split_lines(const std::string& text);

// The text with comments, and with `strings` also the insides of string and character literals,
// turned into spaces. Newlines stay, so that lines and columns keep their numbers.
std::string blank_comments(const std::string& text);
std::string blank_comments_and_strings(const std::string& text);

}  // namespace shardproof::structure
