#include "verify/mutants/binomial.h"

#include <cmath>

#include "base/error.h"

namespace shardproof::verify {
namespace {

// P(at most `hits` in `trials`), 0 < p < 1.
double cumulative(int64_t hits, int64_t trials, double p) {
  const auto n = static_cast<double>(trials);
  double sum = 0;
  for (int64_t i = 0; i <= hits; ++i) {
    const auto k = static_cast<double>(i);
    const double ways = std::lgamma(n + 1) - std::lgamma(k + 1) - std::lgamma(n - k + 1);
    sum += std::exp(ways + k * std::log(p) + (n - k) * std::log1p(-p));
  }
  return sum;
}

}  // namespace

double binomial_upper(int64_t hits, int64_t trials, double confidence) {
  SP_CHECK(0 <= hits && hits <= trials, "{} of {} trials", hits, trials);
  SP_CHECK(0 < confidence && confidence < 1, "a confidence of {}", confidence);
  if (hits == trials) return 1;
  double low = 0, high = 1;  // halving reaches the last bit of probabilities down to 1e-16
  for (int step = 0; step < 100; ++step) {
    const double middle = (low + high) / 2;
    if (middle <= low || middle >= high) break;
    (cumulative(hits, trials, middle) > 1 - confidence ? low : high) = middle;
  }
  return high;
}

double binomial_lower(int64_t hits, int64_t trials, double confidence) {
  return 1 - binomial_upper(trials - hits, trials, confidence);
}

}  // namespace shardproof::verify
