// The fused operations where a rank is left with one query or one key: some refuse such shapes.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include "attention/local_attention.h"
#include "tests/catch.h"
#include "tests/device.h"

namespace shardproof::attention {
namespace {

using at::Tensor;

double distance(const Tensor& x, const Tensor& truth) {
  return (x.to(at::kDouble) - truth.to(at::kDouble)).abs().max().item<double>();
}

TEST_CASE("fused attention: one query, one key", "[attention][cuda]") {
  const at::Device device = tests::device();
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(5);
  const auto draw = [&](int64_t rows, int64_t heads, at::ScalarType dtype) {
    return at::randn({2, rows, heads, 16}, generator, at::kFloat).to(device, dtype);
  };
  int tried = 0;
  for (const LocalBackendInfo& info : local_backends()) {
    if (info.device != (device.is_cuda() ? "cuda" : "cpu")) continue;
    for (const auto& [queries, keys] : {std::pair{1, 1}, {1, 5}, {5, 1}}) {
      for (const bool masked : {false, true}) {
        if (masked && !info.takes_mask) continue;
        CAPTURE(info.name, queries, keys, masked);
        const at::ScalarType dtype = at::kHalf;
        const Tensor q = draw(queries, 2, dtype), k = draw(keys, 2, dtype),
                     v = draw(keys, 2, dtype), dout = draw(queries, 2, dtype);
        Tensor mask;
        if (masked) {
          mask = at::ones({2, keys}, at::kBool);
          mask[1].zero_();  // nothing is seen
          mask = mask.to(device);
        }
        const auto fused = make_local_attention(info.name, device, dtype, masked);
        const auto plain = make_local_attention("math", device, dtype, masked);
        const AttentionOutput got = fused->forward(q, k, v, mask, 0.3);
        const AttentionOutput expected = plain->forward(q, k, v, mask, 0.3);
        CHECK(distance(got.out, expected.out) < 1e-2);
        // As a ring passes it: the lse of all keys, of which these are a part.
        const Tensor lse = expected.lse + 0.5;
        const AttentionGradients g = fused->backward(dout, q, k, v, got.out, lse, mask, 0.3);
        const AttentionGradients truth = plain->backward(dout, q, k, v, got.out, lse, mask, 0.3);
        CHECK(distance(g.dq, truth.dq) < 2e-2);
        CHECK(distance(g.dk, truth.dk) < 2e-2);
        CHECK(distance(g.dv, truth.dv) < 2e-2);
        ++tried;
      }
    }
  }
  CHECK(tried >= 6);
}

}  // namespace
}  // namespace shardproof::attention
