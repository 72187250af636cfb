// How sure a count of successes in independent trials makes one of their probability.
#pragma once
#include <cstdint>

namespace shardproof::verify {

// One-sided bounds of Clopper and Pearson (Biometrika 26, 1934): the probability is below the upper
// (above the lower) one with at least this confidence. Of 0 in n the upper one at 95% is about 3/n.
// Without trials nothing is known: 1 and 0. Errors (kInternal): hits outside [0, trials], a
// confidence outside (0, 1).
double binomial_upper(int64_t hits, int64_t trials, double confidence = 0.95);
double binomial_lower(int64_t hits, int64_t trials, double confidence = 0.95);

}  // namespace shardproof::verify
