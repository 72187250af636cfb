// How small an error do the checks see? Correct random cases are run once; then errors of every
// size on a grid are added to their numbers, and these are judged again, by us and by published
// tests.
//
// An error is a line: (1 + e) times a part of the results, e growing. What a judge allows is a
// convex set around the truth (a ball, a slab, a box) that holds the correct numbers, or a norm
// below a limit; a line leaves it once and for good. So a case has one size from which on the error
// is caught, and halving finds it among the points of the grid without asking at each.
//
// The numbers of 16-bit runs are not rounded again: an error made before the rounding, as real ones
// are, moves them by e on average, also where e is below one unit in the last place. Only where
// bits are compared they are rounded first.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "verify/mutants/error_line.h"
#include "verify/runner.h"

namespace shardproof::verify {

// 1e-16 to 1, four sizes a decade.
std::vector<double> error_sizes();

// The first of `sizes` at which `caught` says so, by halving; sizes.size() if none.
size_t first_caught(const std::vector<double>& sizes, const std::function<bool(double)>& caught);

// How often one judge caught the error.
struct PowerCurve {
  int cases = 0;            // accepted without an error, and changed by it
  int excluded = 0;         // refused without an error, by this judge
  std::vector<int> caught;  // by size, of `cases`

  // The smallest size from which on at least `power` of the cases are caught.
  std::optional<double> smallest(double power = 0.99) const;
};

struct ScopePower {
  c10::ScalarType dtype = c10::ScalarType::Double;
  Scope scope = Scope::kAllGradients;
  int bitwise = 0;  // cases in which bits are compared as well
  PowerCurve ours;
  std::map<std::string, PowerCurve> peers;  // those that look at what is changed
};

struct PowerOptions {
  int64_t seeds = 200;  // cases of attention, of models and of training in each dtype
  int64_t correct = 0;  // further random cases of attention, only to see whether one alarms; and
                        // of models, a twentieth as many
  uint64_t seed = 3;
  std::vector<Scope> scopes = all_scopes();
  std::vector<c10::ScalarType> dtypes;  // empty: all
  RunOptions run;
};

// Correct cases of one kind, and those that the checks refused ("<id>: <what>").
struct AlarmCount {
  std::string kind;  // attention, models, training, training --matched
  int64_t cases = 0;
  std::vector<std::string> alarms;
  double upper() const;  // of their probability, at 95%
};

struct PowerRun {
  std::vector<double> sizes;
  std::vector<ScopePower> scopes;
  std::vector<AlarmCount> alarms;
  double seconds = 0;
  bool holds() const;  // no alarm
};
PowerRun measure_power(const PowerOptions& options);

}  // namespace shardproof::verify
