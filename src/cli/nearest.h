// "Did you mean": the known word that is nearest to a mistyped one.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace shardproof::cli {

// By edit distance; empty if nothing is nearer than half the word.
std::string nearest(std::string_view word, const std::vector<std::string>& known);

}  // namespace shardproof::cli
