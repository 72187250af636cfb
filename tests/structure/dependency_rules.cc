#include "tests/structure/dependency_rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <optional>

namespace shardproof::structure {
namespace {

struct Include {
  int line = 0;
  std::string written;  // with its quotes or angle brackets
  std::string target;   // path in the tree, empty if there is none
  bool quoted() const { return written.starts_with('"'); }
  std::string name() const { return written.substr(1, written.size() - 2); }
};

using Graph = std::map<std::string, std::vector<Include>>;

// The argument of an #include line with its delimiters. `code` is the line with strings blanked:
// a line inside a raw string is no directive.
std::optional<std::string> include_argument(const std::string& line, const std::string& code) {
  const std::size_t hash = code.find_first_not_of(" \t");
  if (hash == std::string::npos || code[hash] != '#') return {};
  const std::size_t word = line.find_first_not_of(" \t", hash + 1);
  if (word == std::string::npos || line.compare(word, 7, "include") != 0) return {};
  const std::size_t open = line.find_first_of("\"<", word + 7);
  if (open == std::string::npos) return {};
  const std::size_t close = line.find(line[open] == '"' ? '"' : '>', open + 1);
  if (close == std::string::npos) return {};
  return line.substr(open, close - open + 1);
}

std::string resolve(const std::string& from, const std::string& name,
                    const std::set<std::string>& tree) {
  const std::filesystem::path folder = std::filesystem::path(from).parent_path();
  for (const std::filesystem::path& base :
       {folder, std::filesystem::path(), std::filesystem::path("src")}) {
    const std::string path = (base / name).lexically_normal().generic_string();
    if (tree.contains(path)) return path;
  }
  return "";
}

std::vector<Include> includes_of(const SourceFile& file, const std::set<std::string>& tree) {
  const std::vector<std::string> lines = split_lines(blank_comments(file.text));
  const std::vector<std::string> code = split_lines(blank_comments_and_strings(file.text));
  std::vector<Include> includes;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    if (const auto argument = include_argument(lines[i], code[i])) {
      Include include{static_cast<int>(i) + 1, *argument, ""};
      include.target = resolve(file.path, include.name(), tree);
      includes.push_back(include);
    }
  }
  return includes;
}

Graph include_graph(const std::vector<SourceFile>& files) {
  std::set<std::string> tree;
  for (const SourceFile& file : files) tree.insert(file.path);
  Graph graph;
  for (const SourceFile& file : files) graph[file.path] = includes_of(file, tree);
  return graph;
}

// LibTorch's headers by their first folder, however they are quoted.
bool is_torch(const Include& include) {
  if (!include.target.empty()) return false;
  static const std::set<std::string> kFolders = {"ATen", "c10", "torch", "caffe2", "torchgen"};
  const std::string name = include.name();
  return kFolders.contains(name.substr(0, name.find('/')));
}

void check_edges(const std::string& file, const std::vector<Include>& includes,
                 const RoomRules& rules, std::vector<Finding>& findings) {
  const std::string room = room_of(file, rules);
  if (room.empty()) {
    findings.push_back({file, 0, "unknown-room", "add the room to the table of allowed edges"});
    return;
  }
  for (const Include& include : includes) {
    auto add = [&](const char* rule, const std::string& text) {
      findings.push_back({file, include.line, rule, include.written + ": " + text});
    };
    if (include.target.empty()) {
      if (include.quoted() && !is_torch(include)) {
        add("missing-include", "not in the tree (other libraries are included with <>)");
      }
      continue;
    }
    const std::string target = room_of(include.target, rules);
    if (target.empty()) {
      add("unknown-room", include.target + " belongs to no room");
    } else if (target != room && !rules.allowed.at(room).contains(target)) {
      add("room-edge", fmt::format("{} may not include {}", room, target));
    }
  }
}

// The way by which `file` comes to a LibTorch header, "a.h -> b.h -> <ATen/ATen.h>", or empty.
std::string way_to_torch(const std::string& file, const Graph& graph, std::set<std::string>& seen) {
  if (!seen.insert(file).second) return "";
  const auto found = graph.find(file);
  if (found == graph.end()) return "";
  for (const Include& include : found->second) {
    if (is_torch(include)) return file + " -> " + include.written;
    if (include.target.empty()) continue;
    const std::string rest = way_to_torch(include.target, graph, seen);
    if (!rest.empty()) return file + " -> " + rest;
  }
  return "";
}

void check_torch_free(const Graph& graph, const RoomRules& rules, std::vector<Finding>& findings) {
  for (const auto& [file, includes] : graph) {
    if (!rules.torch_free.contains(room_of(file, rules))) continue;
    std::set<std::string> seen;
    const std::string way = way_to_torch(file, graph, seen);
    if (!way.empty()) findings.push_back({file, 0, "torch-free", way});
  }
}

// Depth-first search; a file met again while it is still open closes a cycle.
class CycleSearch {
 public:
  CycleSearch(const Graph& graph, std::vector<Finding>& findings)
      : graph_(graph), findings_(findings) {}

  void visit(const std::string& file) {
    if (done_.contains(file)) return;
    const auto open = std::find(path_.begin(), path_.end(), file);
    if (open != path_.end()) {
      std::string way;
      for (auto it = open; it != path_.end(); ++it) way += *it + " -> ";
      findings_.push_back({file, 0, "include-cycle", way + file});
      return;
    }
    path_.push_back(file);
    for (const Include& include : graph_.at(file)) {
      if (!include.target.empty()) visit(include.target);
    }
    path_.pop_back();
    done_.insert(file);
  }

 private:
  const Graph& graph_;
  std::vector<Finding>& findings_;
  std::vector<std::string> path_;
  std::set<std::string> done_;
};

std::set<std::string> joined(std::initializer_list<std::set<std::string>> sets) {
  std::set<std::string> all;
  for (const std::set<std::string>& set : sets) all.insert(set.begin(), set.end());
  return all;
}

}  // namespace

RoomRules project_rooms() {
  const std::set<std::string> product = {"base",    "io",     "comm", "plan", "attention",
                                         "kernels", "models", "fsdp", "rl"};
  const std::set<std::string> simulator = {"sim", "sim/engine"};
  const std::set<std::string> verifier = {"verify", "verify/oracle", "verify/verdict"};
  RoomRules rules;
  rules.allowed = {
      {"base", {}},
      {"io", {"base"}},
      {"comm", {"base", "io"}},
      {"plan", {"base", "io", "comm"}},
      {"kernels", {"base"}},
      {"attention", {"base", "io", "comm", "plan", "kernels"}},
      {"models", {"base", "io", "comm", "plan", "kernels", "attention"}},
      {"fsdp", {"base", "io", "comm", "plan", "attention", "models"}},
      {"rl", {"base", "io", "comm", "plan", "attention", "models", "fsdp"}},
      {"sim/engine", {"base"}},
      {"sim", {"base", "comm", "sim/engine"}},
      {"verify/oracle", {"base"}},
      {"verify/verdict", {"base"}},
      {"verify", joined({product, simulator, {"verify/oracle", "verify/verdict"}})},
      {"bench", joined({product, simulator, verifier})},
      {"cli", joined({product, simulator, verifier, {"bench"}})},
  };
  rules.torch_free = {"sim/engine", "verify/oracle", "verify/verdict"};
  return rules;
}

std::string room_of(const std::string& path, const RoomRules& rules) {
  std::string rest = path.starts_with("src/") ? path.substr(4) : path;
  for (std::size_t slash; (slash = rest.rfind('/')) != std::string::npos;) {
    rest.resize(slash);
    if (rules.allowed.contains(rest)) return rest;
  }
  return "";
}

std::vector<Finding> check_dependencies(const std::vector<SourceFile>& files,
                                        const RoomRules& rules) {
  const Graph graph = include_graph(files);
  std::vector<Finding> findings;
  for (const auto& [file, includes] : graph) check_edges(file, includes, rules, findings);
  check_torch_free(graph, rules, findings);
  CycleSearch cycles(graph, findings);
  for (const auto& [file, includes] : graph) cycles.visit(file);
  return findings;
}

}  // namespace shardproof::structure
