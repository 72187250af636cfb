#include "verify/oracle/attention_oracle.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "tests/catch.h"

using shardproof::verify::attention_oracle;
using shardproof::verify::AttentionProblem;
using shardproof::verify::AttentionReference;

namespace {

using Values = std::vector<double>;
using Long = long double;
using LongValues = std::vector<Long>;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

struct Shape {
  int64_t batch, q_tokens, kv_tokens, q_heads, kv_heads, head_dim;
};

std::string describe(const Shape& s) {
  return fmt::format("B={} Sq={} Sk={} H={} Hk={} D={}", s.batch, s.q_tokens, s.kv_tokens,
                     s.q_heads, s.kv_heads, s.head_dim);
}

// A problem that owns its data.
struct Case {
  Shape shape;
  double scale;
  Values q, k, v, dout;
  std::vector<uint8_t> mask;  // empty = all keys

  Case(const Shape& s, unsigned seed) : shape(s), scale(1 / std::sqrt(double(s.head_dim))) {
    std::mt19937_64 generator(seed);
    std::normal_distribution<double> draw;
    const auto fill = [&](Values& values, int64_t tokens, int64_t heads, double deviation) {
      values.resize(s.batch * tokens * heads * s.head_dim);
      for (double& value : values) value = deviation * draw(generator);
    };
    fill(q, s.q_tokens, s.q_heads, 1.3);
    fill(k, s.kv_tokens, s.kv_heads, 1.3);
    fill(v, s.kv_tokens, s.kv_heads, 1);
    fill(dout, s.q_tokens, s.q_heads, 1);
  }

  // Keeps about two keys in three; sample 1, where there is one, keeps none.
  Case& with_mask(unsigned seed) {
    std::mt19937_64 generator(seed);
    mask.resize(shape.batch * shape.kv_tokens);
    for (size_t i = 0; i < mask.size(); ++i) {
      const bool in_empty_sample = int64_t(i) / shape.kv_tokens == 1;
      mask[i] = !in_empty_sample && generator() % 3 != 0 ? 1 + generator() % 255 : 0;
    }
    return *this;
  }

  bool attends(int64_t b, int64_t j) const {
    return mask.empty() || mask[b * shape.kv_tokens + j] != 0;
  }
  int64_t key_head(int64_t h) const { return h / (shape.q_heads / shape.kv_heads); }
  size_t q_at(int64_t b, int64_t i, int64_t h) const {
    return ((b * shape.q_tokens + i) * shape.q_heads + h) * shape.head_dim;
  }
  size_t kv_at(int64_t b, int64_t j, int64_t g) const {
    return ((b * shape.kv_tokens + j) * shape.kv_heads + g) * shape.head_dim;
  }

  AttentionProblem problem() const {
    return {.batch = shape.batch,
            .q_tokens = shape.q_tokens,
            .kv_tokens = shape.kv_tokens,
            .q_heads = shape.q_heads,
            .kv_heads = shape.kv_heads,
            .head_dim = shape.head_dim,
            .scale = scale,
            .q = q.data(),
            .k = k.data(),
            .v = v.data(),
            .key_mask = mask.empty() ? nullptr : mask.data(),
            .dout = dout.data()};
  }
  AttentionReference evaluate(int64_t row_block = 64) const {
    return attention_oracle(problem(), row_block);
  }
  double loss() const {
    AttentionProblem forward_only = problem();
    forward_only.dout = nullptr;
    const AttentionReference r = attention_oracle(forward_only);
    return std::inner_product(r.out.begin(), r.out.end(), dout.begin(), 0.0);
  }
};

struct LongReference {
  LongValues out, lse, dq, dk, dv, out_abs, dq_abs, dk_abs, dv_abs;
};

Long dot(const double* a, const double* b, int64_t n, bool absolute = false) {
  Long sum = 0;
  for (int64_t c = 0; c < n; ++c) {
    const Long term = Long(a[c]) * b[c];
    sum += absolute ? std::abs(term) : term;
  }
  return sum;
}

// One query row, scalar by scalar, in extended precision. The mask multiplies nothing: masked keys
// are left out by an `if`.
void naive_row(const Case& x, int64_t b, int64_t i, int64_t h, LongReference& r) {
  const int64_t keys = x.shape.kv_tokens, d = x.shape.head_dim, g = x.key_head(h);
  const double* q = &x.q[x.q_at(b, i, h)];
  const double* dout = &x.dout[x.q_at(b, i, h)];
  LongValues p(keys, 0);
  Long sum = 0;
  for (int64_t j = 0; j < keys; ++j) {
    if (!x.attends(b, j)) continue;
    p[j] = std::exp(Long(x.scale) * dot(q, &x.k[x.kv_at(b, j, g)], d));
    sum += p[j];
  }
  r.lse[(b * x.shape.q_heads + h) * x.shape.q_tokens + i] = std::log(sum);
  Long delta = 0, delta_abs = 0;
  LongValues dp(keys, 0), dp_abs(keys, 0);
  for (int64_t j = 0; j < keys; ++j) {
    if (!x.attends(b, j)) continue;
    p[j] /= sum;
    dp[j] = dot(dout, &x.v[x.kv_at(b, j, g)], d);
    dp_abs[j] = dot(dout, &x.v[x.kv_at(b, j, g)], d, true);
    delta += p[j] * dp[j];
    delta_abs += p[j] * dp_abs[j];
  }
  for (int64_t j = 0; j < keys; ++j) {
    if (!x.attends(b, j)) continue;
    const Long ds = x.scale * p[j] * (dp[j] - delta);
    const Long ds_abs = std::abs(x.scale) * p[j] * (dp_abs[j] + delta_abs);
    for (int64_t c = 0; c < d; ++c) {
      const size_t at_q = x.q_at(b, i, h) + c, at_k = x.kv_at(b, j, g) + c;
      r.out[at_q] += p[j] * x.v[at_k];
      r.out_abs[at_q] += p[j] * std::abs(x.v[at_k]);
      r.dq[at_q] += ds * x.k[at_k];
      r.dq_abs[at_q] += ds_abs * std::abs(x.k[at_k]);
      r.dk[at_k] += ds * q[c];
      r.dk_abs[at_k] += ds_abs * std::abs(q[c]);
      r.dv[at_k] += p[j] * dout[c];
      r.dv_abs[at_k] += p[j] * std::abs(dout[c]);
    }
  }
}

LongReference naive(const Case& x) {
  LongReference r;
  for (auto* t : {&r.out, &r.out_abs, &r.dq, &r.dq_abs}) t->resize(x.q.size());
  for (auto* t : {&r.dk, &r.dk_abs, &r.dv, &r.dv_abs}) t->resize(x.k.size());
  r.lse.resize(x.shape.batch * x.shape.q_heads * x.shape.q_tokens);
  for (int64_t b = 0; b < x.shape.batch; ++b) {
    for (int64_t h = 0; h < x.shape.q_heads; ++h) {
      for (int64_t i = 0; i < x.shape.q_tokens; ++i) naive_row(x, b, i, h, r);
    }
  }
  return r;
}

template <class Number>
double norm(const std::vector<Number>& values) {
  Long squares = 0;
  for (const Number value : values) squares += Long(value) * value;
  return double(std::sqrt(squares));
}

// |a - b| / |b|; -inf equals -inf.
template <class Other>
double relative_l2(const Values& a, const std::vector<Other>& b) {
  REQUIRE(a.size() == b.size());
  Long difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::isinf(a[i]) && Other(a[i]) == b[i]) continue;
    difference += (Long(a[i]) - b[i]) * (Long(a[i]) - b[i]);
    norm += Long(b[i]) * b[i];
  }
  return difference == 0 ? 0.0 : double(std::sqrt(difference / norm));
}

// The largest |a - b| / size over elements: rounding errors scale with the size of the summands.
double error_per_size(const Values& a, const LongValues& b, const Values& size) {
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] != b[i]) worst = std::max(worst, double(std::abs(a[i] - b[i]) / size[i]));
  }
  return worst;
}

template <class Other>
void check_close(const AttentionReference& r, const Other& expected, double limit) {
  CHECK(relative_l2(r.out, expected.out) < limit);
  CHECK(relative_l2(r.lse, expected.lse) < limit);
  CHECK(relative_l2(r.dq, expected.dq) < limit);
  CHECK(relative_l2(r.dk, expected.dk) < limit);
  CHECK(relative_l2(r.dv, expected.dv) < limit);
  CHECK(relative_l2(r.out_abs, expected.out_abs) < limit);
  CHECK(relative_l2(r.dq_abs, expected.dq_abs) < limit);
  CHECK(relative_l2(r.dk_abs, expected.dk_abs) < limit);
  CHECK(relative_l2(r.dv_abs, expected.dv_abs) < limit);
}

bool same_bytes(const Values& a, const Values& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0);
}

bool same_bytes(const AttentionReference& a, const AttentionReference& b) {
  return same_bytes(a.out, b.out) && same_bytes(a.lse, b.lse) && same_bytes(a.dq, b.dq) &&
         same_bytes(a.dk, b.dk) && same_bytes(a.dv, b.dv) && same_bytes(a.out_abs, b.out_abs) &&
         same_bytes(a.dq_abs, b.dq_abs) && same_bytes(a.dk_abs, b.dk_abs) &&
         same_bytes(a.dv_abs, b.dv_abs);
}

bool all_equal(const Values& values, double expected) {
  return std::all_of(values.begin(), values.end(), [&](double x) { return x == expected; });
}

const std::vector<Shape> kShapes{
    {2, 32, 32, 4, 4, 16},  // the usual one
    {2, 7, 19, 6, 2, 5},    // grouped queries, odd sizes, cross attention
    {3, 150, 70, 3, 1, 8},  // more rows than a block, one key head
    {1, 1, 1, 1, 1, 1},     // a single number each
    {2, 1, 33, 2, 2, 3},    // one query
    {2, 65, 1, 4, 2, 16},   // one key; a last block of one row
    {1, 3, 300, 2, 1, 24},  // sums longer than a run
};

}  // namespace

TEST_CASE("attention oracle: agrees with scalar loops in extended precision",
          "[verify][attention_oracle]") {
  const size_t which = GENERATE(range(size_t(0), kShapes.size()));
  const bool masked = GENERATE(false, true);
  const Shape& shape = kShapes[which];
  Case x(shape, 100 + which);
  if (masked) {
    x.with_mask(200 + which);
    x.scale *= -1;  // magnitudes stay positive
  }
  INFO(describe(shape) << " masked " << masked);
  const LongReference expected = naive(x);
  const AttentionReference r = x.evaluate();
  check_close(r, expected, 1e-14);
  CHECK(error_per_size(r.out, expected.out, r.out_abs) < 1e-14);
  CHECK(error_per_size(r.dq, expected.dq, r.dq_abs) < 1e-14);
  CHECK(error_per_size(r.dk, expected.dk, r.dk_abs) < 1e-14);
  CHECK(error_per_size(r.dv, expected.dv, r.dv_abs) < 1e-14);
}

TEST_CASE("attention oracle: agrees with extended precision on large logits",
          "[verify][attention_oracle]") {
  // The rounding of a logit is a relative error of its exp: the limit grows with the logits. The
  // last gain takes them to +-3000, where exp in double overflows or vanishes.
  const auto [gain, limit] = GENERATE(table<double, double>({{8, 1e-13}, {500, 1e-11}}));
  Case x({1, 20, 40, 2, 2, 16}, 300);
  for (double& value : x.q) value *= gain;
  const LongReference expected = naive(x);
  const AttentionReference r = x.evaluate();
  CHECK(relative_l2(r.out, expected.out) < limit);
  CHECK(relative_l2(r.lse, expected.lse) < limit);
  CHECK(relative_l2(r.dv, expected.dv) < limit);
  // One key takes nearly all of P: dP - rowsum(P * dP) cancels, so the summands set the measure.
  const auto error_of_summands = [](const Values& a, const LongValues& b, const Values& size) {
    return relative_l2(a, b) * norm(b) / norm(size);
  };
  CHECK(error_of_summands(r.dq, expected.dq, r.dq_abs) < limit);
  CHECK(error_of_summands(r.dk, expected.dk, r.dk_abs) < limit);
  CHECK(relative_l2(r.dq_abs, expected.dq_abs) < limit);
  CHECK(relative_l2(r.dk_abs, expected.dk_abs) < limit);
}

TEST_CASE("attention oracle: gradients agree with finite differences",
          "[verify][attention_oracle]") {
  const bool masked = GENERATE(false, true);
  Case x({2, 4, 6, 4, 2, 3}, 400);
  if (masked) x.with_mask(401);
  x.scale = -0.8;  // the sign of the scale matters to the gradients
  const AttentionReference r = x.evaluate();
  const auto check = [&](Values& input, const Values& gradient) {
    double worst = 0;
    for (size_t i = 0; i < input.size(); ++i) {
      const double centre = input[i], step = 2e-3;
      const auto loss_at = [&](double offset) {
        input[i] = centre + offset;
        return x.loss();
      };
      const double slope =
          (8 * (loss_at(step) - loss_at(-step)) - (loss_at(2 * step) - loss_at(-2 * step))) /
          (12 * step);
      input[i] = centre;
      worst = std::max(worst, std::abs(slope - gradient[i]));
    }
    CHECK(worst < 1e-9);
  };
  check(x.q, r.dq);
  check(x.k, r.dk);
  check(x.v, r.dv);
}

TEST_CASE("attention oracle: poison at masked keys changes no bit", "[verify][attention_oracle]") {
  const double poison = GENERATE(kNaN, kInf, -kInf, 1e300);
  Case clean({3, 9, 20, 4, 2, 6}, 500);
  clean.with_mask(501);
  Case poisoned = clean;
  for (int64_t b = 0; b < 3; ++b) {
    for (int64_t j = 0; j < 20; ++j) {
      if (clean.attends(b, j)) continue;
      const size_t first = clean.kv_at(b, j, 0), size = 2 * 6;
      std::fill_n(&poisoned.k[first], size, poison);
      std::fill_n(&poisoned.v[first], size, poison);
    }
  }
  const AttentionReference r = poisoned.evaluate();
  CHECK(same_bytes(r, clean.evaluate()));
  for (int64_t b = 0; b < 3; ++b) {
    for (int64_t j = 0; j < 20; ++j) {
      if (clean.attends(b, j)) continue;
      for (const Values* t : {&r.dk, &r.dv, &r.dk_abs, &r.dv_abs}) {
        const Values row(t->begin() + clean.kv_at(b, j, 0), t->begin() + clean.kv_at(b, j, 0) + 12);
        CHECK(all_equal(row, 0));
      }
    }
  }
}

TEST_CASE("attention oracle: rows without a key", "[verify][attention_oracle]") {
  Case x({2, 5, 4, 2, 2, 3}, 600);
  x.mask = {1, 0, 1, 1, 0, 0, 0, 0};  // sample 1 has no key
  std::fill(x.q.begin() + x.q_at(1, 0, 0), x.q.end(), kNaN);
  std::fill(x.dout.begin() + x.q_at(1, 0, 0), x.dout.end(), kNaN);
  const AttentionReference r = x.evaluate();
  const auto second_half = [](const Values& t) {
    return Values(t.begin() + t.size() / 2, t.end());
  };
  CHECK(all_equal(second_half(r.lse), -kInf));
  for (const Values* t : {&r.out, &r.dq, &r.dk, &r.dv, &r.out_abs, &r.dq_abs, &r.dk_abs}) {
    CHECK(all_equal(second_half(*t), 0));
  }
  CHECK(std::isfinite(std::accumulate(r.dk.begin(), r.dk.end(), 0.0)));
}

TEST_CASE("attention oracle: no tokens, no batch, no query heads", "[verify][attention_oracle]") {
  const AttentionReference no_keys = Case({2, 3, 0, 2, 2, 4}, 700).evaluate();
  CHECK(no_keys.out.size() == 48);
  CHECK(all_equal(no_keys.out, 0));
  CHECK(all_equal(no_keys.dq, 0));
  CHECK(all_equal(no_keys.lse, -kInf));
  CHECK(no_keys.dk.empty());
  const AttentionReference no_queries = Case({2, 0, 3, 2, 2, 4}, 701).evaluate();
  CHECK(no_queries.out.empty());
  CHECK(no_queries.dk.size() == 48);
  CHECK(all_equal(no_queries.dk, 0));
  CHECK(all_equal(no_queries.dv, 0));
  CHECK(Case({0, 3, 3, 2, 2, 4}, 702).evaluate().out.empty());
  CHECK(all_equal(Case({1, 3, 3, 0, 2, 4}, 703).evaluate().dv, 0));
  AttentionProblem nothing = Case({0, 0, 0, 1, 1, 1}, 704).problem();
  nothing.q = nothing.k = nothing.v = nullptr;
  CHECK(attention_oracle(nothing).lse.empty());
}

TEST_CASE("attention oracle: NaN in a query row stays in that row", "[verify][attention_oracle]") {
  Case x({2, 70, 12, 4, 2, 5}, 800);
  const AttentionReference clean = x.evaluate();
  const size_t bad = x.q_at(1, 65, 3);
  x.q[bad + 2] = kNaN;
  const AttentionReference r = x.evaluate();
  for (size_t i = 0; i < r.out.size(); ++i) {
    const bool in_row = i >= bad && i < bad + 5;
    if (in_row) {
      CHECK((std::isnan(r.out[i]) && std::isnan(r.dq[i])));
    } else if (r.out[i] != clean.out[i] || r.dq[i] != clean.dq[i]) {
      FAIL("element " << i << " changed");
    }
  }
  const auto is_nan = [](double value) { return std::isnan(value); };
  CHECK(std::count_if(r.lse.begin(), r.lse.end(), is_nan) == 1);
  CHECK(std::isnan(r.lse[(1 * 4 + 3) * 70 + 65]));
  // The keys that this row reads: sample 1, key head 1.
  CHECK(std::count_if(r.dk.begin(), r.dk.end(), is_nan) == 12 * 5);
}

TEST_CASE("attention oracle: the row block changes only rounding", "[verify][attention_oracle]") {
  Case x({2, 131, 40, 4, 2, 7}, 900);
  x.with_mask(901);
  const AttentionReference whole = x.evaluate(131);
  for (const int64_t row_block : {1, 2, 5, 64, 130, 1000}) {
    INFO("row block " << row_block);
    check_close(x.evaluate(row_block), whole, 1e-15);
  }
  CHECK(same_bytes(x.evaluate(1000), whole));
  CHECK(same_bytes(x.evaluate(64), x.evaluate(64)));
}

TEST_CASE("attention oracle: the order of the keys does not matter", "[verify][attention_oracle]") {
  Case x({2, 10, 23, 4, 2, 6}, 1000);
  x.with_mask(1001);
  std::vector<int64_t> order(23);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(1002));
  const int64_t token_size = 2 * 6;
  const auto permuted = [&](const auto& values, int64_t size) {
    auto result = values;
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t j = 0; j < 23; ++j) {
        std::copy_n(values.begin() + (b * 23 + order[j]) * size, size,
                    result.begin() + (b * 23 + j) * size);
      }
    }
    return result;
  };
  Case y = x;
  y.k = permuted(x.k, token_size);
  y.v = permuted(x.v, token_size);
  y.mask = permuted(x.mask, 1);
  AttentionReference expected = x.evaluate();
  for (Values* t : {&expected.dk, &expected.dv, &expected.dk_abs, &expected.dv_abs}) {
    *t = permuted(*t, token_size);
  }
  check_close(y.evaluate(), expected, 1e-14);
}

TEST_CASE("attention oracle: a vector added to every key shifts lse and nothing else",
          "[verify][attention_oracle]") {
  Case x({2, 9, 14, 4, 2, 6}, 1100);
  const AttentionReference before = x.evaluate();
  const Values shift{0.5, -1.25, 2, 0.75, -0.5, 1};  // the same for all key heads
  for (size_t i = 0; i < x.k.size(); ++i) x.k[i] += shift[i % 6];
  const AttentionReference after = x.evaluate();
  CHECK(relative_l2(after.out, before.out) < 1e-14);
  CHECK(relative_l2(after.dq, before.dq) < 1e-13);
  CHECK(relative_l2(after.dk, before.dk) < 1e-13);
  CHECK(relative_l2(after.dv, before.dv) < 1e-14);
  Values shifted_lse = before.lse;
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t h = 0; h < 4; ++h) {
      for (int64_t i = 0; i < 9; ++i) {
        shifted_lse[(b * 4 + h) * 9 + i] +=
            x.scale * double(dot(&x.q[x.q_at(b, i, h)], shift.data(), 6));
      }
    }
  }
  CHECK(relative_l2(after.lse, shifted_lse) < 1e-14);
}

TEST_CASE("attention oracle: inner products that must agree", "[verify][attention_oracle]") {
  Case x({2, 11, 17, 6, 3, 4}, 1200);
  x.with_mask(1201);
  const AttentionReference r = x.evaluate();
  const auto product = [](const Values& a, const Values& b) {
    return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
  };
  // out is linear in v; the logits are bilinear in q and k.
  CHECK(product(r.dv, x.v) == Approx(product(r.out, x.dout)).epsilon(1e-12));
  CHECK(product(r.dq, x.q) == Approx(product(r.dk, x.k)).epsilon(1e-12));
  for (size_t i = 0; i < r.out.size(); ++i) {
    if (std::abs(r.out[i]) > r.out_abs[i] * (1 + 1e-14)) FAIL("out exceeds its magnitude at " << i);
    if (std::abs(r.dq[i]) > r.dq_abs[i]) FAIL("dq exceeds its magnitude at " << i);
  }
}

TEST_CASE("attention oracle: two halves of the keys merge into the whole",
          "[verify][attention_oracle]") {
  Case x({2, 8, 12, 2, 2, 5}, 1300);
  Case first = x, second = x;
  first.mask = {1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
  second.mask.resize(24);
  for (int i = 0; i < 24; ++i) second.mask[i] = !first.mask[i];
  const AttentionReference whole = x.evaluate(), a = first.evaluate(), b = second.evaluate();
  Values merged(whole.out.size());
  for (size_t i = 0; i < merged.size(); ++i) {
    const size_t sample = i / 80, token = i / 10 % 8, head = i / 5 % 2;
    const size_t row = (sample * 2 + head) * 8 + token;
    merged[i] = std::exp(a.lse[row] - whole.lse[row]) * a.out[i] +
                std::exp(b.lse[row] - whole.lse[row]) * b.out[i];
  }
  CHECK(relative_l2(merged, whole.out) < 1e-14);
}

TEST_CASE("attention oracle: forward only", "[verify][attention_oracle]") {
  const Case x({2, 9, 14, 4, 2, 6}, 1400);
  AttentionProblem problem = x.problem();
  problem.dout = nullptr;
  const AttentionReference r = attention_oracle(problem), full = x.evaluate();
  CHECK(same_bytes(r.out, full.out));
  CHECK(same_bytes(r.lse, full.lse));
  CHECK(same_bytes(r.out_abs, full.out_abs));
  CHECK((r.dq.empty() && r.dk.empty() && r.dv.empty()));
  CHECK((r.dq_abs.empty() && r.dk_abs.empty() && r.dv_abs.empty()));
}

TEST_CASE("attention oracle: refuses impossible problems", "[verify][attention_oracle]") {
  using shardproof::ErrorKind;
  const Case x({1, 3, 3, 4, 2, 2}, 1500);
  const auto refusal = [](const AttentionProblem& problem, int64_t row_block = 64) {
    try {
      attention_oracle(problem, row_block);
    } catch (const shardproof::Error& error) {
      return std::pair(error.kind(), std::string(error.what()));
    }
    return std::pair(ErrorKind::kInconclusive, std::string("accepted"));
  };
  const auto expect = [&](auto change, ErrorKind kind, const std::string& part) {
    AttentionProblem problem = x.problem();
    change(problem);
    const auto [actual, message] = refusal(problem);
    CHECK(actual == kind);
    CHECK(message.find(part) != std::string::npos);
  };
  using Problem = AttentionProblem;
  expect([](Problem& p) { p.kv_heads = 3; }, ErrorKind::kBadInput, "H=4 Hk=3");
  expect([](Problem& p) { p.kv_heads = 0; }, ErrorKind::kBadInput, "Hk=0");
  expect([](Problem& p) { p.head_dim = 0; }, ErrorKind::kBadInput, "D=0");
  expect([](Problem& p) { p.q_tokens = -1; }, ErrorKind::kBadInput, "Sq=-1");
  expect([](Problem& p) { p.scale = kNaN; }, ErrorKind::kBadInput, "scale");
  expect([](Problem& p) { p.q = nullptr; }, ErrorKind::kInternal, "q is missing");
  expect([](Problem& p) { p.v = nullptr; }, ErrorKind::kInternal, "k or v is missing");
  CHECK(refusal(x.problem(), 0).first == ErrorKind::kInternal);
}

// Hidden, because a wall clock is no matter of right or wrong: run with the tag [timing].
TEST_CASE("attention oracle: time of a small problem", "[.][timing]") {
  const Case x({2, 32, 32, 4, 4, 16}, 1600);
  double best = kInf;
  for (int i = 0; i < 200; ++i) {
    const auto start = std::chrono::steady_clock::now();
    x.evaluate();
    const std::chrono::duration<double, std::milli> spent =
        std::chrono::steady_clock::now() - start;
    best = std::min(best, spent.count());
  }
  WARN("forward, backward and magnitudes of B=2 S=32 H=4 D=16: " << best << " ms");
}
