// Partial results of blocks of keys, merged by their log-sum-exp.
#include "attention/merge.h"

#include "tests/catch.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "tests/attention/attention_support.h"

namespace shardproof::attention {
namespace {

using at::Tensor;
using tests::all_zero;
using tests::Draw;
using tests::error;
using tests::max_abs;
using tests::Problem;

constexpr double kInf = std::numeric_limits<double>::infinity();

// Keys are cut into `blocks` runs of about equal length; the logits of run i are shifted, so that
// the blocks' weights differ by orders of magnitude.
struct Blocks {
  Problem whole;
  std::vector<AttentionOutput> parts;
};

Blocks draw_blocks(uint64_t seed, int64_t blocks, at::ScalarType dtype, const Tensor& mask = {}) {
  Draw draw(seed);
  Blocks b;
  b.whole = {draw.normal({2, 7, 4, 8}),
             draw.normal({2, 23, 2, 8}),
             draw.normal({2, 23, 2, 8}),
             draw.normal({2, 7, 4, 8}),
             mask,
             0.4};
  const Tensor direction = draw.normal({8});
  b.whole.q += direction;
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t begin = 23 * i / blocks, length = 23 * (i + 1) / blocks - begin;
    b.whole.k.narrow(1, begin, length) += direction * draw.normal({});
  }
  for (Tensor* x : {&b.whole.q, &b.whole.k, &b.whole.v}) *x = x->to(dtype);
  const auto local = make_local_attention("math", at::kCPU, dtype, mask.defined());
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t begin = 23 * i / blocks, length = 23 * (i + 1) / blocks - begin;
    b.parts.push_back(local->forward(
        b.whole.q, b.whole.k.narrow(1, begin, length), b.whole.v.narrow(1, begin, length),
        mask.defined() ? mask.narrow(1, begin, length) : mask, b.whole.scale));
  }
  return b;
}

PartialAttention merge_all(const std::vector<AttentionOutput>& parts,
                           const std::vector<size_t>& order) {
  PartialAttention result;
  for (const size_t i : order) result = merge_block(result, parts[i]);
  return result;
}

std::vector<size_t> in_order(size_t n) {
  std::vector<size_t> order(n);
  std::iota(order.begin(), order.end(), size_t{0});
  return order;
}

AttentionOutput no_key_block(const AttentionOutput& like) {
  return {at::zeros_like(like.out), at::full_like(like.lse, -kInf)};
}

TEST_CASE("merge: blocks in any order make the whole attention", "[attention][merge]") {
  for (const int64_t blocks : {1, 2, 4}) {
    const Blocks b = draw_blocks(static_cast<uint64_t>(blocks), blocks, at::kDouble);
    const tests::Solution whole = tests::solve(b.whole);
    std::vector<size_t> order = in_order(b.parts.size());
    int orders = 0;
    do {
      const PartialAttention merged = merge_all(b.parts, order);
      INFO(blocks << " blocks, order number " << orders++);
      CHECK(error(merged.out, whole.out) <= 1e-14);
      CHECK(max_abs(merged.lse, whole.lse) <= 1e-14);
    } while (std::next_permutation(order.begin(), order.end()));
  }
  // More blocks than can be permuted.
  const Blocks b = draw_blocks(9, 23, at::kDouble);
  const tests::Solution whole = tests::solve(b.whole);
  std::vector<size_t> order = in_order(b.parts.size());
  std::mt19937_64 random(5);
  for (int i = 0; i < 10; ++i) {
    std::shuffle(order.begin(), order.end(), random);
    const PartialAttention merged = merge_all(b.parts, order);
    CHECK(error(merged.out, whole.out) <= 1e-14);
    CHECK(error(merged.lse, whole.lse) <= 1e-14);
  }
}

TEST_CASE("merge: masks that empty a block for some samples only", "[attention][merge]") {
  Tensor mask = at::ones({2, 23}, at::kBool);
  mask[0].narrow(0, 0, 11).fill_(false);  // sample 0 sees nothing in blocks 0 and 1 of 4
  mask[1].narrow(0, 17, 6).fill_(false);  // sample 1 nothing in block 3
  const Blocks b = draw_blocks(3, 4, at::kDouble, mask);
  const tests::Solution whole = tests::solve(b.whole);
  std::vector<size_t> order = in_order(4);
  do {
    const PartialAttention merged = merge_all(b.parts, order);
    CHECK(error(merged.out, whole.out) <= 1e-14);
    CHECK(max_abs(merged.lse, whole.lse) <= 1e-14);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_CASE("merge: a block without a key changes no bit", "[attention][merge]") {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    const Blocks b = draw_blocks(4, 3, dtype);
    const PartialAttention plain = merge_all(b.parts, in_order(3));
    for (size_t at = 0; at <= 3; ++at) {
      std::vector<AttentionOutput> parts = b.parts;
      parts.insert(parts.begin() + static_cast<std::ptrdiff_t>(at), no_key_block(b.parts[0]));
      const PartialAttention merged = merge_all(parts, in_order(4));
      INFO(c10::toString(dtype) << ", empty block at " << at);
      CHECK(at::equal(merged.out, plain.out));
      CHECK(at::equal(merged.lse, plain.lse));
    }
  }
}

TEST_CASE("merge: queries that see no key in any block", "[attention][merge]") {
  const Blocks b = draw_blocks(5, 1, at::kFloat);
  const AttentionOutput empty = no_key_block(b.parts[0]);
  const PartialAttention merged = merge_all({empty, empty, empty}, in_order(3));
  CHECK(all_zero(merged.out));
  CHECK(merged.lse.eq(-kInf).all().item<bool>());
}

TEST_CASE("merge: blocks whose weights differ beyond the range of exp", "[attention][merge]") {
  const Blocks b = draw_blocks(6, 2, at::kFloat);
  const AttentionOutput light{b.parts[0].out, b.parts[0].lse - 1000};
  for (const auto& parts : {std::vector{light, b.parts[1]}, std::vector{b.parts[1], light}}) {
    const PartialAttention merged = merge_all(parts, in_order(2));
    CHECK(at::equal(merged.out, b.parts[1].out));
    CHECK(at::equal(merged.lse, b.parts[1].lse));
  }
}

TEST_CASE("merge: 16-bit blocks are merged in fp32", "[attention][merge]") {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    const Blocks b = draw_blocks(7, 6, dtype);
    REQUIRE(b.parts[0].out.scalar_type() == dtype);
    std::vector<AttentionOutput> wide, exact;
    for (const AttentionOutput& part : b.parts) {
      wide.push_back({part.out.to(at::kFloat), part.lse});
      exact.push_back({part.out.to(at::kDouble), part.lse.to(at::kDouble)});
    }
    const PartialAttention merged = merge_all(b.parts, in_order(6));
    CHECK(merged.out.scalar_type() == at::kFloat);
    CHECK(merge_block({}, b.parts[0]).out.scalar_type() == at::kFloat);
    CHECK(merged.lse.scalar_type() == at::kFloat);
    CHECK(at::equal(merged.out, merge_all(wide, in_order(6)).out));
    // Rounding the running sum to 16 bits would cost about 1e-3.
    CHECK(error(merged.out, merge_all(exact, in_order(6)).out) <= 1e-6);
  }
}

// The merge runs inside a custom autograd function and in no-grad code alike.
TEST_CASE("merge: records no gradient and leaves its inputs as they are", "[attention][merge]") {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const Blocks b = draw_blocks(8, 2, dtype);
    const PartialAttention first = merge_block({}, b.parts[0]);
    const Tensor first_out = first.out.clone(), first_lse = first.lse.clone();
    const Tensor block_out = b.parts[1].out.clone(), block_lse = b.parts[1].lse.clone();
    const PartialAttention merged = merge_block(first, b.parts[1]);
    CHECK(!merged.out.requires_grad());
    CHECK(!merged.lse.requires_grad());
    CHECK(at::equal(first.out, first_out));
    CHECK(at::equal(first.lse, first_lse));
    CHECK(at::equal(b.parts[1].out, block_out));
    CHECK(at::equal(b.parts[1].lse, block_lse));
    // Not even after a further merge: a ring's first block may be somebody else's tensor.
    const Tensor merged_out = merged.out.clone();
    merge_block(merged, b.parts[0]);
    CHECK(at::equal(merged.out, merged_out));
    CHECK(at::equal(b.parts[0].out.to(first_out.scalar_type()), first_out));
  }
}

TEST_CASE("merge: zero-sized results", "[attention][merge]") {
  const AttentionOutput none{at::zeros({2, 0, 3, 4}), at::zeros({2, 3, 0})};
  const PartialAttention merged = merge_all({none, none}, in_order(2));
  CHECK(merged.out.sizes().vec() == std::vector<int64_t>{2, 0, 3, 4});
  CHECK(merged.lse.sizes().vec() == std::vector<int64_t>{2, 3, 0});
}

}  // namespace
}  // namespace shardproof::attention
