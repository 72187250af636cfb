#include "comm/tag.h"

#include <utility>

namespace shardproof::comm {
namespace {
thread_local std::string t_path;
thread_local std::string t_mark;
}  // namespace

std::string current_tag() { return t_path + t_mark; }
std::string current_path() { return t_path; }

CollectiveScope::CollectiveScope(std::string_view name) : old_length_(t_path.size()) {
  if (!t_path.empty()) t_path += '/';
  t_path += name;
}
CollectiveScope::~CollectiveScope() { t_path.resize(old_length_); }

MarkedScope::MarkedScope(std::string path, std::string mark)
    : old_path_(std::exchange(t_path, std::move(path))),
      old_mark_(std::exchange(t_mark, std::move(mark))) {}
MarkedScope::~MarkedScope() {
  t_path = std::move(old_path_);
  t_mark = std::move(old_mark_);
}

}  // namespace shardproof::comm
