// How near the errors of a verdict come to their limits, as bins and as an inline SVG.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "verify/verdict/verdict.h"

namespace shardproof::verify {

// Error quotients in [begin, end); a quotient of exactly 1 is allowed and belongs to the last bin
// below it.
struct QuotientBin {
  double begin = 0, end = 0;
  int64_t tensors = 0;
};

// 20 bins of 0.05 up to the limit, then (1, 2], (2, 10], (10, 100] and beyond, where only the order
// of magnitude matters.
std::vector<QuotientBin> quotient_histogram(const Verdict& verdict);

// Colours come from the page's CSS classes "within", "beyond", "axis" and "tick".
std::string histogram_svg(const std::vector<QuotientBin>& bins);

}  // namespace shardproof::verify
