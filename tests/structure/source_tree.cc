#include "tests/structure/source_tree.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <sstream>

#include "base/error.h"

namespace shardproof::structure {
namespace {

namespace fs = std::filesystem;

std::string output_of(const std::string& command) {
  std::FILE* pipe = popen(command.c_str(), "r");
  if (!pipe) return "";
  std::string out;
  for (char buffer[4096]; const std::size_t n = fread(buffer, 1, sizeof buffer, pipe);) {
    out.append(buffer, n);
  }
  return pclose(pipe) == 0 ? out : "";
}

std::vector<std::string> files_by_git(const fs::path& root) {
  const std::string git = fmt::format("git -C '{}' ", root.string());
  const std::string quiet = " 2>/dev/null";
  // Inside another project's work tree git would list by that project's ignore rules.
  std::string top = output_of(git + "rev-parse --show-toplevel" + quiet);
  if (!top.empty()) top.pop_back();
  std::error_code ignored;
  if (top.empty() || !fs::equivalent(top, root, ignored)) return {};
  std::istringstream names(
      output_of(git + "ls-files -z --cached --others --exclude-standard" + quiet));
  std::vector<std::string> files;
  for (std::string name; std::getline(names, name, '\0');) files.push_back(name);
  return files;
}

std::vector<std::string> files_by_walk(const fs::path& root) {
  std::vector<std::string> files;
  for (fs::recursive_directory_iterator it(root), end; it != end; ++it) {
    const std::string name = it->path().filename().string();
    const bool skipped = name.starts_with('.') || name == "build" || name == "__pycache__";
    if (it->is_directory() && skipped) it.disable_recursion_pending();
    if (it->is_regular_file()) files.push_back(fs::relative(it->path(), root).generic_string());
  }
  return files;
}

std::string read_file(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

bool is_text(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  char start[8192];
  stream.read(start, sizeof start);
  return std::find(start, start + stream.gcount(), '\0') == start + stream.gcount();
}

bool has_suffix(std::string_view path, std::initializer_list<std::string_view> suffixes) {
  return std::any_of(suffixes.begin(), suffixes.end(),
                     [&](std::string_view suffix) { return path.ends_with(suffix); });
}

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

// Walks through C++ text, blanking what is not code.
class Blanker {
 public:
  Blanker(const std::string& text, bool strings) : text_(text), out_(text), strings_(strings) {}

  std::string run() {
    while (at_ < text_.size()) {
      if (text_.compare(at_, 2, "//") == 0) {
        blank_to(std::min(text_.find('\n', at_), text_.size()), true);
      } else if (text_.compare(at_, 2, "/*") == 0) {
        blank_to(after(text_.find("*/", at_ + 2), 2), true);
      } else if (text_[at_] == '"' && is_raw()) {
        raw_string();
      } else if (text_[at_] == '"' || (text_[at_] == '\'' && !is_digit_separator())) {
        literal(text_[at_]);
      } else {
        ++at_;
      }
    }
    return out_;
  }

 private:
  std::size_t after(std::size_t found, std::size_t length) const {
    return found == std::string::npos ? text_.size() : found + length;
  }

  void blank_to(std::size_t end, bool blank) {
    for (; at_ < end; ++at_) {
      if (blank && text_[at_] != '\n') out_[at_] = ' ';
    }
  }

  bool is_raw() const {
    if (at_ == 0 || text_[at_ - 1] != 'R') return false;
    std::size_t begin = at_ - 1;  // of the prefix: R, LR, uR, UR, u8R
    while (begin > 0 && is_word(text_[begin - 1])) --begin;
    const std::string_view prefix = std::string_view(text_).substr(begin, at_ - begin);
    return prefix == "R" || prefix == "LR" || prefix == "uR" || prefix == "UR" || prefix == "u8R";
  }

  bool is_digit_separator() const {  // 1'000, but not u8'a'
    if (at_ == 0 || at_ + 1 >= text_.size() || !is_word(text_[at_ - 1])) return false;
    std::size_t begin = at_;
    while (begin > 0 && (is_word(text_[begin - 1]) || text_[begin - 1] == '\'')) --begin;
    return std::isdigit(static_cast<unsigned char>(text_[begin])) != 0;
  }

  void raw_string() {
    const std::size_t open = text_.find('(', at_);
    if (open == std::string::npos) {
      ++at_;
      return;
    }
    const std::string close = ")" + text_.substr(at_ + 1, open - at_ - 1) + "\"";
    const std::size_t end = text_.find(close, open);
    at_ = open + 1;
    blank_to(std::min(end, text_.size()), strings_);
    at_ = after(end, close.size());
  }

  void literal(char quote) {
    std::size_t end = at_ + 1;
    // An unescaped newline ends the literal too: the text is then not C++ (#error don't).
    while (end < text_.size() && text_[end] != quote && text_[end] != '\n') {
      end += text_[end] == '\\' ? 2 : 1;
    }
    ++at_;
    blank_to(std::min(end, text_.size()), strings_);
    if (at_ < text_.size()) ++at_;
  }

  const std::string& text_;
  std::string out_;
  bool strings_;
  std::size_t at_ = 0;
};

}  // namespace

std::string to_string(const std::vector<Finding>& findings) {
  std::string out;
  for (const Finding& finding : findings) {
    out += fmt::format("{}:{}: [{}] {}\n", finding.file, finding.line, finding.rule, finding.text);
  }
  return out;
}

fs::path project_root() { return SHARDPROOF_SOURCE_DIR; }

std::vector<std::string> project_files(const fs::path& root) {
  std::vector<std::string> files = files_by_git(root);
  if (files.empty()) files = files_by_walk(root);
  // git also lists files that were deleted since, links and submodules.
  std::erase_if(files, [&](const std::string& file) {
    return fs::is_symlink(root / file) || !fs::is_regular_file(root / file);
  });
  std::sort(files.begin(), files.end());
  return files;
}

std::vector<SourceFile> read_sources(const fs::path& root,
                                     const std::vector<std::string>& folders) {
  std::vector<SourceFile> sources;
  for (const std::string& file : project_files(root)) {
    const bool inside = std::any_of(folders.begin(), folders.end(), [&](const std::string& folder) {
      return file.starts_with(folder + "/");
    });
    if (inside && is_source(file)) sources.push_back({file, read_file(root / file)});
  }
  return sources;
}

std::vector<SourceFile> read_text_files(const fs::path& root) {
  std::vector<SourceFile> texts;
  for (const std::string& file : project_files(root)) {
    if (is_text(root / file)) texts.push_back({file, read_file(root / file)});
  }
  return texts;
}

bool is_header(std::string_view path) { return has_suffix(path, {".h", ".hpp", ".cuh"}); }

bool is_source(std::string_view path) {
  return is_header(path) || has_suffix(path, {".cc", ".cpp", ".cxx", ".c", ".cu"});
}

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::string blank_comments(const std::string& text) { return Blanker(text, false).run(); }

std::string blank_comments_and_strings(const std::string& text) {
  return Blanker(text, true).run();
}

}  // namespace shardproof::structure
