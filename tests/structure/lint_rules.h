// Rules about the text of single files. Each is a textual check: cheap, without a compiler, and
// therefore blind to aliases; it is to catch what is written by habit.
//
// A line is exempt from a rule where it, or the line above it, says
// `lint-allow(<rule>): <reason>` in a comment; the reason is not optional.
#pragma once
#include <string>
#include <vector>

#include "tests/structure/source_tree.h"

namespace shardproof::structure {

// Draws from a default generator (its state is shared by all ranks of a process, so a result would
// depend on their interleaving): manual_seed, default generators, at::/torch:: and method calls of
// random operations without an argument that names a generator ("gen" or "rng" in it, or `random`);
// any library dropout, which takes no generator; std::rand, std::srand, std::random_device. Rules
// "default-generator", "dropout", "std-rand".
std::vector<Finding> check_random(const SourceFile& file);

// "using-namespace": in a header it would reach everyone who includes it.
std::vector<Finding> check_using_namespace(const SourceFile& header);

// "pragma-once": a header without it.
std::vector<Finding> check_pragma_once(const SourceFile& header);

// "file-length": more than 500 lines. "line-length": more than 100 columns.
std::vector<Finding> check_lengths(const SourceFile& file);

// "todo-owner": TODO or FIXME that is not followed by an owner in parentheses.
std::vector<Finding> check_todo(const SourceFile& file);

// "machine-path": an absolute path below a folder that only one machine has (somebody's home, a
// workplace's mount). Relative paths and URLs with such a folder inside are none.
std::vector<Finding> check_machine_paths(const SourceFile& file);

}  // namespace shardproof::structure
