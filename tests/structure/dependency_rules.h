// Which room (folder) may include which: docs/design.md, "Dependency direction".
#pragma once
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tests/structure/source_tree.h"

namespace shardproof::structure {

struct RoomRules {
  // Direct includes that a room may make, beside its own files.
  std::map<std::string, std::set<std::string>> allowed;
  // Rooms that must not see LibTorch, not even through what they include.
  std::set<std::string> torch_free;
};

// The graph of this project: one table.
RoomRules project_rooms();

// "src/base/error.h" -> "base", "sim/engine/scheduler.h" -> "sim/engine", "verify/cases/x.cc" ->
// "verify". The longest room of `rules` that is a folder of the path; empty for an unknown room.
std::string room_of(const std::string& path, const RoomRules& rules);

// Rules "room-edge" (an include that the table does not allow), "unknown-room", "missing-include"
// (a quoted include that is not in the tree), "torch-free" and "include-cycle". Includes are looked
// up as the build does: beside the file, from the root, from src/.
std::vector<Finding> check_dependencies(const std::vector<SourceFile>& files,
                                        const RoomRules& rules);

}  // namespace shardproof::structure
