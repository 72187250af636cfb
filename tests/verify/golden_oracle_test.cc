// The Eigen oracle against the goldens, which numpy computed in extended precision.
#include "tests/catch.h"

#include <ATen/ATen.h>

#include "verify/golden.h"
#include "verify/oracle/attention_oracle.h"
#include "verify/oracle/error_norms.h"

namespace shardproof::verify {
namespace {

using at::Tensor;

std::span<const double> view(const Tensor& x) {
  return {x.const_data_ptr<double>(), static_cast<size_t>(x.numel())};
}

AttentionReference evaluate(const AttentionGolden& g) {
  const auto wide = [](const Tensor& x) { return x.to(at::kDouble).contiguous(); };
  const Tensor q = wide(g.q), k = wide(g.k), v = wide(g.v), dout = wide(g.cotangent);
  const Tensor mask = g.mask.defined() ? g.mask.to(at::kByte).contiguous() : Tensor();
  AttentionProblem p;
  p.batch = g.batch, p.q_tokens = p.kv_tokens = g.tokens;
  p.q_heads = g.heads, p.kv_heads = g.kv_heads, p.head_dim = g.head_dim;
  p.scale = g.scale;
  p.q = q.const_data_ptr<double>(), p.k = k.const_data_ptr<double>();
  p.v = v.const_data_ptr<double>(), p.dout = dout.const_data_ptr<double>();
  p.key_mask = mask.defined() ? mask.const_data_ptr<uint8_t>() : nullptr;
  return attention_oracle(p);
}

void check_close(const char* name, std::span<const double> got, const Tensor& expected) {
  const ErrorNorms norms = error_norms(got, view(expected.contiguous()));
  INFO(name << ": relative error " << norms.relative_l2 * 1e15 << "e-15");
  CHECK(norms.finite);
  CHECK(norms.relative_l2 <= 1e-13);
  CHECK(norms.nonzero_where_zero == 0);
}

TEST_CASE("golden oracle: the oracle agrees with every attention golden",
          "[verify][attention_oracle]") {
  int goldens = 0;
  for (const auto& folder : find_goldens(SHARDPROOF_SOURCE_DIR "/datasets/goldens")) {
    if (golden_kind(folder) != "attention") continue;
    ++goldens;
    const AttentionGolden g = load_attention_golden(folder);
    INFO(g.name);
    const AttentionReference r = evaluate(g);
    check_close("out", r.out, g.out);
    check_close("lse", r.lse, g.lse);
    check_close("dq", r.dq, g.dq);
    check_close("dk", r.dk, g.dk);
    check_close("dv", r.dv, g.dv);
  }
  CHECK(goldens >= 4);
}

// The comparison can fail: one float32 input off by one unit in the last place shows.
TEST_CASE("golden oracle: one unit in the last place of one input is seen",
          "[verify][attention_oracle]") {
  AttentionGolden g =
      load_attention_golden(SHARDPROOF_SOURCE_DIR "/datasets/goldens/attention_joint_textimage");
  g.k = g.k.clone();
  float* element = g.k[0][9][0].data_ptr<float>();
  *element = std::nextafter(*element, 100.0f);
  const AttentionReference r = evaluate(g);
  CHECK(error_norms(r.out, view(g.out)).relative_l2 > 1e-11);
  CHECK(error_norms(r.dq, view(g.dq)).relative_l2 > 1e-11);
}

}  // namespace
}  // namespace shardproof::verify
