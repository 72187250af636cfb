#include "tests/structure/lint_rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <regex>
#include <set>

namespace shardproof::structure {
namespace {

constexpr std::size_t kMostLines = 500;
constexpr std::size_t kMostColumns = 100;

// Collects the findings of one file, but for the lines that are exempt.
class Report {
 public:
  explicit Report(const SourceFile& file) : file_(file), lines_(split_lines(file.text)) {}

  const std::vector<std::string>& lines() const { return lines_; }

  void add(std::size_t line, const std::string& rule, const std::string& text) {
    if (line > 0 && (allows(line, rule) || allows(line - 1, rule))) return;
    findings_.push_back({file_.path, static_cast<int>(line), rule, text});
  }

  std::vector<Finding> take() { return std::move(findings_); }

 private:
  bool allows(std::size_t line, const std::string& rule) const {
    if (line == 0 || line > lines_.size()) return false;
    const std::string marker = "lint-allow(" + rule + "):";
    const std::size_t at = lines_[line - 1].find(marker);
    if (at == std::string::npos) return false;
    return lines_[line - 1].find_first_not_of(" \t", at + marker.size()) != std::string::npos;
  }

  const SourceFile& file_;
  std::vector<std::string> lines_;
  std::vector<Finding> findings_;
};

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

// A name in code with what stands before it: "at::" in at::randn, "." in x.normal_.
struct Name {
  std::string before;
  std::string name;
  std::size_t line = 0;
  bool called = false;
  std::string arguments;  // of the call
};

std::size_t skip_space(const std::string& code, std::size_t at) {
  while (at < code.size() && std::isspace(static_cast<unsigned char>(code[at]))) ++at;
  return at;
}

// What lies between `open` and the parenthesis that closes it.
std::string inside_parentheses(const std::string& code, std::size_t open) {
  int depth = 0;
  for (std::size_t at = open; at < code.size(); ++at) {
    depth += code[at] == '(';
    depth -= code[at] == ')';
    if (depth == 0) return code.substr(open + 1, at - open - 1);
  }
  return code.substr(open + 1);
}

// The qualifier ("torch::nn::") or access (".", "->") that ends at `end`.
std::string before_name(const std::string& code, std::size_t end) {
  std::size_t begin = end;
  if (end >= 2 && code.compare(end - 2, 2, "->") == 0) return "->";
  if (end >= 1 && code[end - 1] == '.') return ".";
  while (begin >= 2 && code.compare(begin - 2, 2, "::") == 0) {
    begin -= 2;
    while (begin > 0 && is_word(code[begin - 1])) --begin;
  }
  return code.substr(begin, end - begin);
}

std::vector<Name> names_in(const std::string& code) {
  std::vector<Name> names;
  std::size_t line = 1;
  for (std::size_t at = 0; at < code.size();) {
    if (!is_word(code[at])) {
      line += code[at++] == '\n';
      continue;
    }
    std::size_t end = at;
    while (end < code.size() && is_word(code[end])) ++end;
    Name name{before_name(code, at), code.substr(at, end - at), line, false, ""};
    const std::size_t next = skip_space(code, end);
    if (next < code.size() && code[next] == '(') {
      name.called = true;
      name.arguments = inside_parentheses(code, next);
    }
    names.push_back(std::move(name));
    at = end;
  }
  return names;
}

bool from_library(const Name& name) {
  return name.before.starts_with("at::") || name.before.starts_with("torch::") ||
         name.before.starts_with("::at::") || name.before.starts_with("::torch::");
}

bool is_method(const Name& name) { return name.before == "." || name.before == "->"; }

bool names_generator(const std::string& arguments) {
  static const std::regex kGenerator(R"(gen|rng|\brandom_?\b)", std::regex::icase);
  return std::regex_search(arguments, kGenerator);
}

bool sets_default_generator(const Name& name) {
  static const std::set<std::string> kNames = {"getDefaultCPUGenerator", "getDefaultCUDAGenerator",
                                               "default_generator", "defaultGenerator",
                                               "manual_seed_all"};
  return kNames.contains(name.name) || (name.name == "manual_seed" && from_library(name));
}

// Unqualified calls count where the name can hardly mean anything else.
bool draws_without_generator(const Name& name) {
  static const std::set<std::string> kTelling = {"randn",     "randint",    "randperm",
                                                 "rand_like", "randn_like", "randint_like"};
  static const std::set<std::string> kFunctions = {"rand",        "bernoulli", "normal",
                                                   "multinomial", "poisson",   "binomial"};
  static const std::set<std::string> kMethods = {
      "bernoulli",    "multinomial", "normal_",    "uniform_", "bernoulli_",
      "exponential_", "log_normal_", "geometric_", "cauchy_",  "random_"};
  if (!name.called || names_generator(name.arguments)) return false;
  if (is_method(name)) return kMethods.contains(name.name);
  if (kTelling.contains(name.name)) return from_library(name) || name.before.empty();
  return from_library(name) && (kFunctions.contains(name.name) || kMethods.contains(name.name));
}

bool drops_out(const Name& name) {
  static const std::set<std::string> kNames = {
      "dropout",       "dropout_",       "native_dropout",   "feature_dropout",
      "alpha_dropout", "_fused_dropout", "feature_dropout_", "feature_alpha_dropout",
      "Dropout",       "Dropout2d",      "Dropout3d",        "AlphaDropout"};
  return from_library(name) && kNames.contains(name.name);
}

bool is_std_random(const Name& name) {
  const bool standard = name.before == "std::" || name.before == "::";
  const bool bare =
      name.before.empty() && name.called && name.arguments.find(',') == std::string::npos;
  if (name.name == "random_device") return standard || name.before.empty();
  return (name.name == "rand" || name.name == "srand") && (standard || bare);
}

std::size_t columns(const std::string& line) {
  return static_cast<std::size_t>(std::count_if(line.begin(), line.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  }));
}

}  // namespace

std::vector<Finding> check_random(const SourceFile& file) {
  Report report(file);
  for (const Name& name : names_in(blank_comments_and_strings(file.text))) {
    const std::string what = name.before + name.name;
    if (sets_default_generator(name)) {
      report.add(name.line, "default-generator", what + ": make a generator for the rank instead");
    } else if (draws_without_generator(name)) {
      report.add(name.line, "default-generator", what + ": pass a generator");
    } else if (drops_out(name)) {
      report.add(name.line, "dropout", what + " takes no generator: use the project's own dropout");
    } else if (is_std_random(name)) {
      report.add(name.line, "std-rand", what + ": a run must be reproducible from its seed");
    }
  }
  return report.take();
}

std::vector<Finding> check_using_namespace(const SourceFile& header) {
  static const std::regex kUsing(R"(\busing\s+namespace\b)");
  Report report(header);
  const std::vector<std::string> code = split_lines(blank_comments_and_strings(header.text));
  for (std::size_t i = 0; i < code.size(); ++i) {
    if (!std::regex_search(code[i], kUsing)) continue;
    report.add(i + 1, "using-namespace", "name what is used");
  }
  return report.take();
}

std::vector<Finding> check_pragma_once(const SourceFile& header) {
  Report report(header);
  const std::vector<std::string> code = split_lines(blank_comments(header.text));
  const bool found = std::any_of(code.begin(), code.end(), [](const std::string& line) {
    return line.starts_with("#pragma once");
  });
  if (!found) report.add(0, "pragma-once", "a header without #pragma once");
  return report.take();
}

std::vector<Finding> check_lengths(const SourceFile& file) {
  Report report(file);
  if (report.lines().size() > kMostLines) {
    report.add(0, "file-length",
               fmt::format("{} lines; at most {}: split it by subject", report.lines().size(),
                           kMostLines));
  }
  for (std::size_t i = 0; i < report.lines().size(); ++i) {
    const std::size_t width = columns(report.lines()[i]);
    if (width <= kMostColumns) continue;
    report.add(i + 1, "line-length", fmt::format("{} columns; at most {}", width, kMostColumns));
  }
  return report.take();
}

std::vector<Finding> check_todo(const SourceFile& file) {
  static const std::regex kOpen(R"(\b(TODO|FIXME)\b(?!\([A-Za-z][\w.@-]*\)))");
  Report report(file);
  for (std::size_t i = 0; i < report.lines().size(); ++i) {
    if (!std::regex_search(report.lines()[i], kOpen)) continue;
    report.add(i + 1, "todo-owner", "write TODO(owner): ...");
  }
  return report.take();
}

std::vector<Finding> check_machine_paths(const SourceFile& file) {
  // Before the path: the start, a delimiter, a compiler's -I or -L, or a file URL.
  static const std::regex kPath(
      R"((^|[\s"'`=:,;<>|(\[{]|-[A-Z]|file://)/(work|home|root|Users)/[\w.])");
  static const std::string kFolders[] = {"work", "home", "root", "Users"};
  Report report(file);
  for (std::size_t i = 0; i < report.lines().size(); ++i) {
    const std::string& line = report.lines()[i];
    // The expression is slow on the long lines of data files; most lines have no candidate.
    const bool candidate =
        std::any_of(std::begin(kFolders), std::end(kFolders), [&](const std::string& folder) {
          return line.find("/" + folder + "/") != std::string::npos;
        });
    std::smatch match;
    if (!candidate || !std::regex_search(line, match, kPath)) continue;
    report.add(i + 1, "machine-path", match.str() + "...: paths are relative or given by the user");
  }
  return report.take();
}

}  // namespace shardproof::structure
