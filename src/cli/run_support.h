// What commands that run many cases have in common.
#pragma once
#include <functional>
#include <string>
#include <vector>

namespace shardproof::cli {

// An output that cannot be written is said before the work, not after it. Errors (kBadInput): a
// path (empty: none) whose folder is not there.
void check_outputs(const std::vector<std::string>& paths);

// A line on the terminal that counts cases; empty where nobody would see it, or with `quiet`.
std::function<void(size_t done, size_t all)> progress_line(bool quiet);

}  // namespace shardproof::cli
