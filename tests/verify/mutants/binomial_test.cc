#include "verify/mutants/binomial.h"

#include <cmath>

#include "base/error.h"
#include "tests/catch.h"

namespace shardproof::verify {
namespace {

TEST_CASE("binomial: without a hit the bound has a closed form, about 3/n", "[sensitivity]") {
  for (const int64_t n : {1, 10, 200, 20000}) {
    const double exact = 1 - std::pow(0.05, 1.0 / static_cast<double>(n));
    CHECK(std::abs(binomial_upper(0, n) - exact) < 1e-12);
    CHECK(binomial_lower(0, n) == 0);
    CHECK(std::abs(binomial_lower(n, n) - (1 - exact)) < 1e-12);
    CHECK(binomial_upper(n, n) == 1);
  }
  CHECK(std::abs(binomial_upper(0, 20000) * 20000 - 3) < 0.01);
  CHECK(binomial_upper(0, 0) == 1);
  CHECK(binomial_lower(0, 0) == 0);
}

TEST_CASE("binomial: known intervals", "[sensitivity]") {
  // The two-sided 95% interval of 5 in 10, in every table: 0.1871 to 0.8129.
  CHECK(std::abs(binomial_upper(5, 10, 0.975) - 0.8129) < 5e-5);
  CHECK(std::abs(binomial_lower(5, 10, 0.975) - 0.1871) < 5e-5);
  // By definition: at the bound so few hits (at most 2 of 50) come with probability 5%.
  const double p = binomial_upper(2, 50);
  const double few = std::pow(1 - p, 50) + 50 * p * std::pow(1 - p, 49) +
                     50 * 49 / 2.0 * p * p * std::pow(1 - p, 48);
  CHECK(std::abs(few - 0.05) < 1e-9);
  CHECK_THROWS_AS(binomial_upper(3, 2), Error);
  CHECK_THROWS_AS(binomial_upper(1, 2, 1.0), Error);
}

}  // namespace
}  // namespace shardproof::verify
