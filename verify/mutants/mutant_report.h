// The kill matrix for people and programs.
#pragma once
#include <string>

#include "verify/mutants/mutant_run.h"
#include "verify/mutants/run_facts.h"

namespace shardproof::verify {

// One line a mutant, then the sums. `color`: ANSI.
std::string mutants_to_terminal(const MutantRun& run, bool color);
// Format shardproof-mutants, version 1 (docs/formats.md).
std::string mutants_to_json(const MutantRun& run, const RunFacts& facts);
// A page that needs nothing else.
std::string mutants_to_html(const MutantRun& run, const RunFacts& facts);

// "58 of 58 mutants killed, first wrong tensor as expected in 57, cause named first in 55, 0 false
// alarms in 97 correct cases, 41.2 s"
std::string mutants_summary(const MutantRun& run);

}  // namespace shardproof::verify
