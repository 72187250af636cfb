// The tag of a collective call: module path plus site, "transformer_blocks.3/attn/qkv.seq_to_head".
// Calls of a backward pass carry the forward's tag with a trailing ', those of a recomputation a
// trailing ~. Tags are thread-local; they name calls in errors and traces and are matched between
// ranks by the simulator.
#pragma once
#include <string>
#include <string_view>

namespace shardproof::comm {

// The tag that a call issued now would carry.
std::string current_tag();
// Path without the mark, to be stored by an autograd function and handed to AdjointScope.
std::string current_path();

// Appends "/<name>" to the thread's path for its lifetime.
class CollectiveScope {
 public:
  explicit CollectiveScope(std::string_view name);
  ~CollectiveScope();
  CollectiveScope(const CollectiveScope&) = delete;
  CollectiveScope& operator=(const CollectiveScope&) = delete;

 private:
  size_t old_length_;
};

// Replaces path and mark for its lifetime: backward code runs outside the forward's scopes.
class MarkedScope {
 public:
  MarkedScope(std::string path, std::string mark);
  ~MarkedScope();
  MarkedScope(const MarkedScope&) = delete;
  MarkedScope& operator=(const MarkedScope&) = delete;

 private:
  std::string old_path_;
  std::string old_mark_;
};

inline constexpr const char* kAdjointMark = "'";
inline constexpr const char* kRecomputeMark = "~";

}  // namespace shardproof::comm
