#include "verify/oracle/error_norms.h"

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "tests/catch.h"

using shardproof::verify::error_norms;
using shardproof::verify::ErrorNorms;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

using Values = std::vector<double>;

Values normal(size_t n, unsigned seed) {
  std::mt19937_64 generator(seed);
  std::normal_distribution<double> draw;
  Values values(n);
  for (double& value : values) value = draw(generator);
  return values;
}

Values scaled(Values values, double factor) {
  for (double& value : values) value *= factor;
  return values;
}

bool has_nan(const ErrorNorms& e) {
  return std::isnan(e.relative_l2) || std::isnan(e.ratio) || std::isnan(e.cosine) ||
         std::isnan(e.max_abs) || std::isnan(e.ref_norm) || std::isnan(e.ratio_excess);
}

}  // namespace

TEST_CASE("error norms: a small case by hand", "[verify][error_norms]") {
  const ErrorNorms e = error_norms(Values{3, 4, 1}, Values{3, 0, 5});
  CHECK(e.count == 3);
  CHECK(e.finite);
  CHECK(e.ref_norm == Approx(std::sqrt(34.0)).epsilon(1e-15));
  CHECK(e.relative_l2 == Approx(std::sqrt(32.0 / 34.0)).epsilon(1e-15));
  CHECK(e.ratio == Approx(14.0 / 34.0).epsilon(1e-15));
  CHECK(e.ratio_excess == Approx(-20.0 / 34.0).epsilon(1e-15));
  CHECK(e.cosine == Approx(14.0 / std::sqrt(26.0 * 34.0)).epsilon(1e-15));
  CHECK(e.max_abs == 4);
  CHECK(e.max_abs_index == 1);  // the first of two equal ones
  CHECK(e.nonzero_where_zero == 1);
}

TEST_CASE("error norms: agree with long double on long data", "[verify][error_norms]") {
  const size_t n = 200'003;
  const Values ref = normal(n, 1), noise = normal(n, 2);
  Values x(n);
  for (size_t i = 0; i < n; ++i) x[i] = 0.5 * ref[i] + 1e-3 * noise[i];
  long double xr = 0, rr = 0, dd = 0, xx = 0;
  for (size_t i = 0; i < n; ++i) {
    const long double a = x[i], r = ref[i];
    xr += a * r, rr += r * r, xx += a * a, dd += (a - r) * (a - r);
  }
  const ErrorNorms e = error_norms(x, ref);
  CHECK(e.relative_l2 == Approx(double(std::sqrt(dd / rr))).epsilon(1e-14));
  CHECK(e.ratio == Approx(double(xr / rr)).epsilon(1e-14));
  CHECK(e.cosine == Approx(double(xr / std::sqrt(xx * rr))).epsilon(1e-14));
  CHECK(e.ref_norm == Approx(double(std::sqrt(rr))).epsilon(1e-12));
}

TEST_CASE("error norms: equal tensors are exactly equal", "[verify][error_norms]") {
  const Values ref = normal(1000, 3);
  const ErrorNorms e = error_norms(ref, ref);
  CHECK(e.relative_l2 == 0);
  CHECK(e.ratio == 1);
  CHECK(e.ratio_excess == 0);
  CHECK(e.cosine == 1);
  CHECK(e.max_abs == 0);
  CHECK(e.max_abs_index == 0);
}

TEST_CASE("error norms: a factor is found to the last bits", "[verify][error_norms]") {
  const Values ref = normal(1000, 4);
  CHECK(error_norms(scaled(ref, 2), ref).ratio == Approx(2).epsilon(1e-15));
  CHECK(error_norms(scaled(ref, -1), ref).cosine == Approx(-1).epsilon(1e-15));
  // Four units in the last place of 1: lost in the rounding of <x, ref> / <ref, ref>, and here
  // found with all its digits.
  const double tiny = std::ldexp(1.0, -50);
  Values powers(1000);
  for (size_t i = 0; i < powers.size(); ++i) powers[i] = std::ldexp(1.0, int(i % 8));
  CHECK(error_norms(scaled(powers, 1 + tiny), powers).ratio_excess == Approx(tiny).epsilon(1e-14));
}

TEST_CASE("error norms: NaN and infinity make the comparison unusable", "[verify][error_norms]") {
  const Values good{1, 2, 3, 4};
  const auto [x, ref, index] = GENERATE_COPY(table<Values, Values, int64_t>({
      {{1, kNaN, 3, kNaN}, good, 1},
      {{1, 2, kInf, 4}, good, 2},
      {{1, 2, 3, -kInf}, good, 3},
      {good, {kNaN, 2, 3, 4}, 0},
      {good, {1, -kInf, 3, 4}, 1},
      {{1, kInf, 3, 4}, {1, kInf, 3, 4}, 1},  // only the log-sum-exp's -inf is a value
      {{1, kNaN, 3, 4}, {1, kNaN, 3, 4}, 1},
      {{-kInf, 2, kInf, 4}, {-kInf, 2, -kInf, 4}, 2},
  }));
  const ErrorNorms e = error_norms(x, ref);
  CHECK_FALSE(e.finite);
  CHECK(e.relative_l2 == kInf);
  CHECK(e.ratio == kInf);
  CHECK(e.cosine == 0);
  CHECK(e.max_abs == kInf);
  CHECK(e.max_abs_index == index);
  CHECK(std::isfinite(e.ref_norm));
  CHECK_FALSE(has_nan(e));
}

TEST_CASE("error norms: -inf equals -inf and stays out of the norms", "[verify][error_norms]") {
  const ErrorNorms e = error_norms(Values{-kInf, 3, 4.5}, Values{-kInf, 3, 4});
  CHECK(e.finite);
  CHECK(e.count == 3);
  CHECK(e.ref_norm == 5);
  CHECK(e.relative_l2 == 0.1);
  CHECK(e.max_abs_index == 2);
  const ErrorNorms all = error_norms(Values{-kInf, -kInf}, Values{-kInf, -kInf});
  CHECK(all.finite);
  CHECK(all.relative_l2 == 0);
  CHECK(all.ratio == 1);
}

TEST_CASE("error norms: a reference of zeros", "[verify][error_norms]") {
  const ErrorNorms same = error_norms(Values{0, -0.0, 0}, Values{0, 0, -0.0});
  CHECK(same.relative_l2 == 0);
  CHECK(same.ratio == 1);
  CHECK(same.nonzero_where_zero == 0);
  const ErrorNorms other = error_norms(Values{0, 1e-300, 0}, Values{0, 0, 0});
  CHECK(other.finite);
  CHECK(other.relative_l2 == kInf);
  CHECK(other.ratio == kInf);
  CHECK(other.max_abs == 1e-300);
  CHECK(other.max_abs_index == 1);
  CHECK(other.nonzero_where_zero == 1);
  CHECK_FALSE(has_nan(other));
  CHECK(error_norms(Values{kNaN, 0}, Values{0, 0}).nonzero_where_zero == 1);
}

TEST_CASE("error norms: a result of zeros", "[verify][error_norms]") {
  const ErrorNorms e = error_norms(Values{0, 0}, Values{3, 4});
  CHECK(e.relative_l2 == Approx(1).epsilon(1e-15));
  CHECK(e.ratio == Approx(0).margin(1e-15));
  CHECK(e.cosine == 0);
}

TEST_CASE("error norms: without elements", "[verify][error_norms]") {
  const ErrorNorms e = error_norms({}, {});
  CHECK(e.count == 0);
  CHECK(e.finite);
  CHECK(e.relative_l2 == 0);
  CHECK(e.ratio == 1);
  CHECK(e.max_abs == 0);
  CHECK(e.max_abs_index == -1);
}

TEST_CASE("error norms: do not depend on the magnitude of the data", "[verify][error_norms]") {
  const Values ref = normal(100, 5), x = normal(100, 6);
  const ErrorNorms plain = error_norms(x, ref);
  for (const int exponent : {-1000, -600, 600, 1000}) {
    const double factor = std::ldexp(1.0, exponent);
    const ErrorNorms e = error_norms(scaled(x, factor), scaled(ref, factor));
    CHECK(e.relative_l2 == plain.relative_l2);  // powers of two round nothing
    CHECK(e.ratio == plain.ratio);
    CHECK(e.cosine == plain.cosine);
  }
  const ErrorNorms vast = error_norms(scaled(x, 1e300), scaled(ref, 1e-300));
  CHECK(vast.relative_l2 > 1e300);
  CHECK_FALSE(has_nan(vast));
  CHECK(error_norms(Values{1.7e308}, Values{-1.7e308}).relative_l2 == kInf);
}

TEST_CASE("error norms: sizes must agree", "[verify][error_norms]") {
  try {
    error_norms(Values{1, 2}, Values{1});
    FAIL("accepted");
  } catch (const shardproof::Error& error) {
    CHECK(error.kind() == shardproof::ErrorKind::kInternal);
    CHECK(std::string(error.what()).find("2 elements are compared with 1") != std::string::npos);
  }
}
