// What was measured, for people and programs.
#pragma once
#include <string>
#include <utility>

#include "verify/mutants/run_facts.h"
#include "verify/mutants/sensitivity.h"

namespace shardproof::verify {

// Of the published tests that look at what is changed, the one that sees the smallest and the one
// that sees only the largest error; none, or a size that is missing: not even an error of 1.
struct PeerRange {
  std::string sharpest, bluntest;  // empty: no published test looks at it
  std::optional<double> smallest, largest;
};
PeerRange peer_range(const ScopePower& scope);

// "3.2e-11"; "> 1" where even an error of 1 is not seen.
std::string size_text(const std::optional<double>& size);

// "0 alarms in 20,000 correct cases of attention: with 95% confidence fewer than 1 in 6,676"
std::string alarm_text(const AlarmCount& count);

// One line a dtype and scope, then the alarms. `color`: ANSI.
std::string power_to_terminal(const PowerRun& run, bool color);
std::string power_summary(const PowerRun& run);
// Format shardproof-power, version 1 (docs/formats.md): whole curves.
std::string power_to_json(const PowerRun& run, const RunFacts& facts);
// A page that needs nothing else, with every curve drawn (sensitivity_page.cc).
std::string power_to_html(const PowerRun& run, const RunFacts& facts);

}  // namespace shardproof::verify
