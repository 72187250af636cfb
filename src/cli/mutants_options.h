// What `shardproof mutants` was asked for. Plain values, as verify_options.h.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace shardproof::cli {

struct MutantsOptions {
  std::vector<std::string> only;  // ids of the catalogue; empty: all
  bool list = false;
  uint64_t seed = 0;    // of the cases' data, 0: the catalogue's own; or of the random mutants
  bool power = false;   // instead: how small an error the checks see
  int64_t seeds = 200;  // of which so many cases of each kind and dtype,
  int64_t correct = 0;  // and so many more that only must not alarm
  // Random mutants instead of the catalogue: this many of the seed, from this number on; 0: none.
  int64_t fuzz = 0, from = 0;
  std::string device = "cpu";
  bool quiet = false;
  std::string json, html;
  std::string command;  // as typed
};

// What the module exports; returns the exit code. Errors are thrown.
using RunMutants = int (*)(const MutantsOptions&);
inline constexpr const char* kRunMutants = "shardproof_run_mutants";

}  // namespace shardproof::cli
