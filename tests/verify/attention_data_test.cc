// What the cases are made of: reproducible, and such that errors show.
#include "verify/attention/attention_data.h"

#include "tests/catch.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <limits>
#include <set>

#include "verify/attention/ownership.h"
#include "verify/suites/attention_suite.h"

namespace shardproof::verify {
namespace {

using at::Tensor;

constexpr double kInf = std::numeric_limits<double>::infinity();

std::vector<AttentionCase> some_cases() {
  at::set_num_threads(1);  // small tensors: a second thread only waits
  CaseFilter filter;
  filter.sp = {1, 4, 5};
  std::vector<AttentionCase> cases;
  for (const AttentionCase& c : attention_suite(filter, 1, false)) cases.push_back(c);
  for (const AttentionCase& c : random_attention_cases(filter, 2, 100)) cases.push_back(c);
  return cases;
}

bool same_bytes(const AttentionData& a, const AttentionData& b) {
  const auto equal = [](const Tensor& x, const Tensor& y) {
    return x.defined() == y.defined() && (!x.defined() || at::equal(x, y));
  };
  return equal(a.q, b.q) && equal(a.k, b.k) && equal(a.v, b.v) && equal(a.dout, b.dout) &&
         equal(a.mask, b.mask) && a.scale == b.scale && a.reference.out == b.reference.out &&
         a.reference.lse == b.reference.lse && a.reference.dq == b.reference.dq &&
         a.reference.dk == b.reference.dk && a.reference.dv == b.reference.dv &&
         a.reference.dq_abs == b.reference.dq_abs;
}

TEST_CASE("attention data: the seed decides every byte", "[verify][data]") {
  for (const AttentionCase& c : some_cases()) {
    INFO(c.id());
    const AttentionData data = draw_attention_data(c);
    CHECK(same_bytes(data, draw_attention_data(c)));
    AttentionCase other = c;
    ++other.seed;
    const AttentionData different = draw_attention_data(other);
    CHECK(!at::equal(data.q, different.q));
    CHECK(!at::equal(data.v, different.v));
  }
}

TEST_CASE("attention data: shapes, dtypes, and another draw for each sample", "[verify][data]") {
  for (const AttentionCase& c : some_cases()) {
    INFO(c.id());
    const AttentionData data = draw_attention_data(c);
    const int64_t batch = c.mesh.dp * c.batch;
    const std::vector<int64_t> q = {batch, c.tokens(), c.heads, c.head_dim},
                               k = {batch, c.tokens(), c.kv_heads, c.head_dim};
    CHECK(data.q.sizes().vec() == q);
    CHECK(data.dout.sizes().vec() == q);
    CHECK(data.k.sizes().vec() == k);
    CHECK(data.v.sizes().vec() == k);
    for (const Tensor& x : {data.q, data.k, data.v, data.dout}) {
      CHECK(x.scalar_type() == c.dtype);
      for (int64_t b = 1; b < batch; ++b) CHECK(!at::equal(x[0], x[b]));
    }
    CHECK(data.scale == Approx(1 / std::sqrt(static_cast<double>(c.head_dim))));
  }
}

// Logits in fp64, [B,H,Sq,Sk].
Tensor logits_of(const AttentionData& data) {
  const int64_t group = data.q.size(2) / data.k.size(2);
  const Tensor k = data.k.to(at::kDouble).repeat_interleave(group, 2);
  return at::einsum("bihd,bjhd->bhij", {data.q.to(at::kDouble), k}) * data.scale;
}

TEST_CASE("attention data: the reference is that of the rounded inputs", "[verify][data]") {
  for (const AttentionCase& c : some_cases()) {
    INFO(c.id());
    const AttentionData data = draw_attention_data(c);
    Tensor logits = logits_of(data);
    if (data.mask.defined()) {
      logits = logits.masked_fill(data.mask.logical_not().unsqueeze(1).unsqueeze(1), -kInf);
    }
    const Tensor lse = at::logsumexp(logits, {-1});
    const Tensor p = at::exp(logits - lse.masked_fill(lse.eq(-kInf), kInf).unsqueeze(-1));
    const Tensor v = data.v.to(at::kDouble).repeat_interleave(c.heads / c.kv_heads, 2);
    const Tensor out = at::einsum("bhij,bjhd->bihd", {p, v});
    CHECK(at::allclose(at::tensor(data.reference.out, at::kDouble).view(out.sizes()), out, 1e-12,
                       1e-12));
    const Tensor got = at::tensor(data.reference.lse, at::kDouble).view(lse.sizes());
    CHECK(at::equal(got.eq(-kInf), lse.eq(-kInf)));
    CHECK(at::allclose(got.masked_fill(got.eq(-kInf), 0), lse.masked_fill(lse.eq(-kInf), 0), 1e-12,
                       1e-12));
  }
}

// A merge that ignores the blocks' log-sum-exps can only be noticed where they differ.
TEST_CASE("attention data: log-sum-exps of key blocks differ", "[verify][data]") {
  Tensor mean = at::zeros({4}, at::kDouble);
  int64_t cases = 0;
  for (const AttentionCase& c : some_cases()) {
    if (c.tokens() < 8) continue;
    INFO(c.id());
    const AttentionData data = draw_attention_data(c);
    const Tensor logits = logits_of(data);
    std::vector<Tensor> blocks;
    for (const Tensor& block : at::tensor_split(logits, 4, -1)) {
      blocks.push_back(at::logsumexp(block, {-1}).mean());
    }
    const Tensor lse = at::stack(blocks);
    CHECK((lse.max() - lse.min()).item<double>() > 1);
    CHECK(logits.abs().max().item<double>() < 60);  // exp() of them stays in the range of fp32
    mean += lse - lse.mean();
    ++cases;
  }
  mean /= cases;
  INFO("mean by block: " << c10::str(mean));
  CHECK((mean[0] - mean[1]).item<double>() > 1);
  CHECK((mean[1] - mean[2]).item<double>() > 1);
  CHECK((mean[3] - mean[2]).item<double>() > 1);
  CHECK((mean[0] - mean[2]).item<double>() > 4);
}

std::vector<bool> row(const Tensor& mask, int64_t sample) {
  std::vector<bool> bits;
  for (int64_t t = 0; t < mask.size(1); ++t) bits.push_back(mask[sample][t].item<bool>());
  return bits;
}

// A run of true, then false up to `span`, then true.
void check_ragged(const std::vector<bool>& keys, int64_t span, std::set<int64_t>& lengths) {
  int64_t length = 0;
  while (length < span && keys[static_cast<size_t>(length)]) ++length;
  CHECK(length >= 1);
  for (size_t t = 0; t < keys.size(); ++t) {
    const auto token = static_cast<int64_t>(t);
    CHECK(keys[t] == (token < length || token >= span));
  }
  lengths.insert(length);
}

void check_empty_rank(const AttentionCase& c, const std::vector<bool>& keys) {
  const Ownership o = derive_ownership(c);
  std::set<int> hidden, seen;
  for (size_t t = 0; t < keys.size(); ++t) {
    const auto text = static_cast<size_t>(c.text);
    const int owner = t < text ? o.text[t].sp_rank : o.image[t - text].sp_rank;
    (keys[t] ? seen : hidden).insert(owner);
  }
  // A rank that holds no token at all may be the empty one.
  CHECK(hidden.size() <= 1);
  for (const int rank : hidden) CHECK(seen.count(rank) == 0);
}

TEST_CASE("attention data: masks are what their names say", "[verify][data]") {
  std::set<int64_t> lengths;
  std::set<MaskKind> kinds;
  bool any_hidden = false;
  for (const AttentionCase& c : some_cases()) {
    INFO(c.id());
    const AttentionData data = draw_attention_data(c);
    CHECK(data.mask.defined() == (c.mask != MaskKind::kNone));
    kinds.insert(c.mask);
    if (!data.mask.defined()) continue;
    CHECK(data.mask.scalar_type() == at::kBool);
    CHECK(data.mask.sizes().vec() == std::vector<int64_t>{c.mesh.dp * c.batch, c.tokens()});
    for (int64_t b = 0; b < data.mask.size(0); ++b) {
      const std::vector<bool> keys = row(data.mask, b);
      const auto count = std::count(keys.begin(), keys.end(), true);
      switch (c.mask) {
        case MaskKind::kRagged:
          check_ragged(keys, c.text > 0 ? c.text : c.tokens(), lengths);
          break;
        case MaskKind::kScattered:
          CHECK(count >= 1);
          any_hidden |= count < c.tokens();
          break;
        case MaskKind::kOneKey:
          CHECK(count == 1);
          break;
        case MaskKind::kEmptyRank:
          check_empty_rank(c, keys);
          break;
        case MaskKind::kNone:
          break;
      }
    }
  }
  CHECK(kinds.size() == 5);
  CHECK(lengths.size() >= 5);
  CHECK(any_hidden);
}

TEST_CASE("attention data: ragged lengths differ between samples", "[verify][data]") {
  AttentionCase c = AttentionCase::parse("attention/joint/ulysses/ulysses2/fp64/b8.t40.ragged");
  const Tensor lengths = draw_attention_data(c).mask.sum(1);
  std::set<int64_t> different;
  for (int64_t b = 0; b < 8; ++b) different.insert(lengths[b].item<int64_t>());
  CHECK(different.size() >= 4);
}

TEST_CASE("attention data: a golden's results stand where its inputs are exact", "[verify][data]") {
  const AttentionGolden golden =
      load_attention_golden(SHARDPROOF_SOURCE_DIR "/datasets/goldens/attention_keymask");
  CaseFilter filter;
  filter.sp = {2};
  for (const AttentionCase& c : golden_cases(golden, filter, true)) {
    INFO(c.id());
    const AttentionData data = golden_attention_data(c, golden);
    CHECK(data.q.scalar_type() == c.dtype);
    CHECK(at::equal(data.q.to(at::kDouble), golden.q.to(c.dtype).to(at::kDouble)));
    CHECK(at::equal(data.mask, golden.mask));
    const bool is_exact = c.dtype == at::kDouble || c.dtype == at::kFloat;
    const Tensor out = at::tensor(data.reference.out, at::kDouble).view(golden.out.sizes());
    CHECK(at::equal(out, golden.out) == is_exact);
    CHECK(at::allclose(out, golden.out, 0.1, 0.1));
    CHECK(data.reference.dq_abs.size() == data.reference.dq.size());
  }
}

}  // namespace
}  // namespace shardproof::verify
