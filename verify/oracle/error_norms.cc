#include "verify/oracle/error_norms.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"

namespace shardproof::verify {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

bool equal_minus_infinity(double x, double ref) { return x == -kInfinity && ref == -kInfinity; }

// What one pass without squares can tell.
struct Extent {
  double x = 0, ref = 0, difference = 0;  // largest magnitude among the finite elements
  int64_t difference_index = 0;           // where `difference` is first reached
  int64_t first_unusable = -1;            // first pair that is neither finite nor -inf twice
  int64_t nonzero_where_zero = 0;
};

Extent measure_extent(std::span<const double> x, std::span<const double> ref) {
  Extent extent;
  for (size_t i = 0; i < x.size(); ++i) {
    if (ref[i] == 0 && x[i] != 0) ++extent.nonzero_where_zero;
    if (std::isfinite(ref[i])) extent.ref = std::max(extent.ref, std::abs(ref[i]));
    if (!std::isfinite(x[i]) || !std::isfinite(ref[i])) {
      if (!equal_minus_infinity(x[i], ref[i]) && extent.first_unusable < 0) {
        extent.first_unusable = static_cast<int64_t>(i);
      }
      continue;
    }
    extent.x = std::max(extent.x, std::abs(x[i]));
    const double difference = std::abs(x[i] - ref[i]);
    if (difference > extent.difference) {
      extent.difference = difference;
      extent.difference_index = static_cast<int64_t>(i);
    }
  }
  return extent;
}

// A power of two near `magnitude`: dividing by it is exact and keeps squares in range.
double unit_near(double magnitude) {
  return magnitude > 0 && std::isfinite(magnitude) ? std::ldexp(1.0, std::ilogb(magnitude)) : 1.0;
}

// Inner products of x, ref and d = x - ref, each in its own unit.
struct Products {
  double xx = 0, rr = 0, dd = 0, xr = 0, dr = 0;

  void add(const Products& other) {
    xx += other.xx;
    rr += other.rr;
    dd += other.dd;
    xr += other.xr;
    dr += other.dr;
  }
};

struct Units {
  double x, ref, difference;
};

Products inner_products(std::span<const double> x, std::span<const double> ref,
                        const Units& units) {
  // Runs bound the rounding error of long sums: it grows with their number, not with the elements.
  constexpr size_t kRun = 1024;
  Products total;
  for (size_t begin = 0; begin < x.size(); begin += kRun) {
    const size_t end = std::min(begin + kRun, x.size());
    Products run;
    for (size_t i = begin; i < end; ++i) {
      if (!std::isfinite(x[i]) || !std::isfinite(ref[i])) continue;
      const double a = x[i] / units.x, r = ref[i] / units.ref;
      const double d = (x[i] - ref[i]) / units.difference;
      run.add({a * a, r * r, d * d, a * r, d * r});
    }
    total.add(run);
  }
  return total;
}

double norm_of_finite(std::span<const double> values, double largest) {
  const double unit = unit_near(largest);
  double squares = 0;
  for (const double value : values) {
    if (std::isfinite(value)) squares += (value / unit) * (value / unit);
  }
  return std::sqrt(squares) * unit;
}

ErrorNorms unusable(ErrorNorms norms, const Extent& extent) {
  norms.finite = false;
  norms.relative_l2 = norms.ratio = norms.ratio_excess = norms.max_abs = kInfinity;
  norms.cosine = 0;
  norms.max_abs_index = extent.first_unusable;
  return norms;
}

}  // namespace

ErrorNorms error_norms(std::span<const double> x, std::span<const double> ref) {
  SP_CHECK(x.size() == ref.size(), "{} elements are compared with {}", x.size(), ref.size());
  ErrorNorms norms;
  norms.count = static_cast<int64_t>(x.size());
  if (x.empty()) return norms;

  const Extent extent = measure_extent(x, ref);
  norms.nonzero_where_zero = extent.nonzero_where_zero;
  norms.ref_norm = norm_of_finite(ref, extent.ref);
  if (extent.first_unusable >= 0) return unusable(norms, extent);

  norms.max_abs = extent.difference;
  norms.max_abs_index = extent.difference_index;
  if (extent.difference == 0) return norms;  // equal, zeros included
  const Units units{unit_near(extent.x), unit_near(extent.ref), unit_near(extent.difference)};
  const double difference_in_ref_units = units.difference / units.ref;
  const bool beyond_range =
      !std::isfinite(extent.difference) || !std::isfinite(difference_in_ref_units);
  if (extent.ref == 0 || beyond_range) {
    norms.relative_l2 = norms.ratio = norms.ratio_excess = kInfinity;
    norms.cosine = 0;
    return norms;
  }

  const Products p = inner_products(x, ref, units);
  norms.relative_l2 = std::sqrt(p.dd / p.rr) * difference_in_ref_units;
  norms.ratio_excess = p.dr / p.rr * difference_in_ref_units;
  norms.ratio = 1 + norms.ratio_excess;
  norms.cosine = p.xx > 0 ? std::clamp(p.xr / std::sqrt(p.xx * p.rr), -1.0, 1.0) : 0.0;
  return norms;
}

}  // namespace shardproof::verify
