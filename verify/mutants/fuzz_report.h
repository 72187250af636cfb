// What a run of random mutants found, for people and programs.
#pragma once
#include <string>

#include "verify/mutants/fuzz.h"
#include "verify/mutants/run_facts.h"

namespace shardproof::verify {

// "2,000 random mutants of seed 1: 1,900 killed, 100 equivalent, 0 errors, 0 survived, 180.1 s"
std::string fuzz_summary(const FuzzRun& run);
// A table by operator, a line and a command for each survivor and error, the summary.
std::string fuzz_to_terminal(const FuzzRun& run, bool color);
// Format shardproof-fuzz, version 1 (docs/formats.md).
std::string fuzz_to_json(const FuzzRun& run, const RunFacts& facts);

}  // namespace shardproof::verify
