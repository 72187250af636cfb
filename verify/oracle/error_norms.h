// How far a tensor is from its reference, in the numbers that verdicts are made of.
#pragma once
#include <cstdint>
#include <span>

namespace shardproof::verify {

// x is the result under test, ref the reference; <.,.> and |.| are the Euclidean product and norm
// over all elements. No member is ever NaN, because a comparison with NaN is false and would let an
// error pass that is looked for with `>`.
//
// Elements where both are -inf are equal (the log-sum-exp of a row without keys) and stay out of
// all norms. Any other pair that is not two finite numbers makes the whole comparison unusable:
// finite = false, relative_l2 = ratio = max_abs = inf, cosine = 0, max_abs_index = the first such.
struct ErrorNorms {
  double relative_l2 = 0;      // |x - ref| / |ref|; for |ref| = 0: 0 if x is all zero too, else inf
  double ratio = 1;            // <x, ref> / <ref, ref>, the best-fit scale of x against ref;
                               // for |ref| = 0: 1 if x is all zero too, else inf
  double cosine = 1;           // <x, ref> / (|x| |ref|), 1 if both norms are 0, 0 if one is
  double max_abs = 0;          // largest |x - ref|
  int64_t max_abs_index = -1;  // its first position in the flattened tensor; -1 if there is none
  int64_t count = 0;           // elements
  double ref_norm = 0;         // |ref|, over its finite elements
  bool finite = true;
  int64_t nonzero_where_zero = 0;  // elements not zero (NaN included) where ref is exactly 0
  double ratio_excess = 0;         // ratio - 1 from <x - ref, ref>: still exact where it is 1e-20
};

// Squares neither overflow nor vanish, whatever the magnitude of the data. Without elements: the
// default values above. Throws Error (kInternal) if the sizes differ.
ErrorNorms error_norms(std::span<const double> x, std::span<const double> ref);

}  // namespace shardproof::verify
