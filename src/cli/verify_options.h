// What `shardproof verify` was asked for. Plain values: the program parses them without LibTorch,
// the module that holds the commands acts on them.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace shardproof::cli {

struct VerifyOptions {
  std::vector<std::string> suites;   // attention, goldens; empty: all
  std::vector<std::string> goldens;  // folders; given: only these are run
  std::string case_id;               // given: exactly this case
  std::vector<int> sp, ring, dp;
  std::vector<std::string> dtypes;
  std::string device = "cpu";
  std::string transport = "sim";
  double timeout = 30;  // seconds: of a collective, and of a rank that no longer answers
  std::string backend = "auto";
  std::vector<std::string> faults;  // to plant, as sim::parse_fault reads them
  uint64_t seed = 1;
  uint64_t schedule_seed = 0;
  int64_t random_cases = 0;
  bool quick = false;
  bool matched = false;
  bool quiet = false;
  std::string json, junit, html;
  std::string command;     // as typed, for the verdict
  std::string source_dir;  // where datasets/goldens is
};

// What the module exports; returns the exit code. Errors are thrown.
using RunVerify = int (*)(const VerifyOptions&);
inline constexpr const char* kRunVerify = "shardproof_run_verify";

}  // namespace shardproof::cli
