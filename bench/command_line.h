// Command lines of benchmarks.
#pragma once
#include <CLI/CLI.hpp>

namespace shardproof::bench {

// False if help was asked for, and printed. Errors (kBadInput): words that cannot be read.
bool parse_command_line(CLI::App& app, int argc, char** argv);

}  // namespace shardproof::bench
