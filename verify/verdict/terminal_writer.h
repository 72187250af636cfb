// Writes a verdict as text for the engineer who ran it: a table by suite, mode and dtype, the
// evidence of each failure, and one last line that says whether the equivalence holds.
//
// At most 110 columns, but for a replay command or case id with a single longer word, which is not
// cut so that it can be pasted. Names are printed without control characters.
#pragma once
#include <string>

#include "verify/verdict/verdict.h"

namespace shardproof::verify {

struct TerminalOptions {
  bool color = false;     // ANSI colours: for terminals, not for pipes
  bool quiet = false;     // only the last line
  int max_failures = 10;  // cases whose evidence is printed; negative: all
};

std::string to_terminal(const Verdict& verdict, const TerminalOptions& options);

}  // namespace shardproof::verify
