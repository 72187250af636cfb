#include "verify/attention/attention_data.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "verify/attention/ownership.h"

namespace shardproof::verify {
namespace {

using at::Tensor;

Tensor normal(at::IntArrayRef shape, at::Generator& random) {
  return at::randn(shape, random, at::TensorOptions(at::kDouble));
}

// Keys of block i get a component along their head's direction u that every query shares: the
// block's log-sum-exp shifts by about 2, 0, -2, 1 on average while logits keep a moderate range.
void skew_blocks(Tensor& q, Tensor& k, at::Generator& random) {
  constexpr double kShift[] = {1.5, 0.0, -1.5, 0.75};
  const int64_t tokens = k.size(1), dim = k.size(3), group = q.size(2) / k.size(2);
  Tensor u = normal({k.size(2), dim}, random);
  u = u / u.norm(2, {-1}, true).clamp_min(1e-3) * std::sqrt(static_cast<double>(dim));
  q.add_(u.repeat_interleave(group, 0), 2.0 / std::sqrt(static_cast<double>(dim)));
  for (int64_t t = 0; t < tokens; ++t) {
    k.select(1, t).add_(u, kShift[t * 4 / tokens] / 1.4142);
  }
}

Tensor ragged_mask(const AttentionCase& c, int64_t batch, at::Generator& random) {
  Tensor mask = at::ones({batch, c.tokens()}, at::kBool);
  const int64_t span = c.text > 0 ? c.text : c.tokens();
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t length = at::randint(1, span + 1, {1}, random).item<int64_t>();
    mask.select(0, b).narrow(0, length, span - length).fill_(false);
  }
  return mask;
}

Tensor empty_rank_mask(const AttentionCase& c, int64_t batch, at::Generator& random) {
  Tensor mask = at::ones({batch, c.tokens()}, at::kBool);
  const Ownership o = derive_ownership(c);
  const int64_t rank = at::randint(0, c.mesh.sp(), {1}, random).item<int64_t>();
  for (size_t t = 0; t < o.text.size(); ++t) {
    if (o.text[t].sp_rank == rank) mask.select(1, static_cast<int64_t>(t)).fill_(false);
  }
  for (size_t t = 0; t < o.image.size(); ++t) {
    if (o.image[t].sp_rank == rank) mask.select(1, c.text + static_cast<int64_t>(t)).fill_(false);
  }
  return mask;
}

Tensor draw_mask(const AttentionCase& c, int64_t batch, at::Generator& random) {
  const int64_t tokens = c.tokens();
  switch (c.mask) {
    case MaskKind::kNone:
      return {};
    case MaskKind::kRagged:
      return ragged_mask(c, batch, random);
    case MaskKind::kEmptyRank:
      return empty_rank_mask(c, batch, random);
    case MaskKind::kScattered: {
      Tensor mask = at::rand({batch, tokens}, random, at::TensorOptions(at::kDouble)).lt(0.6);
      mask.select(1, at::randint(0, tokens, {1}, random).item<int64_t>()).fill_(true);
      return mask;
    }
    case MaskKind::kOneKey: {
      Tensor mask = at::zeros({batch, tokens}, at::kBool);
      for (int64_t b = 0; b < batch; ++b) {
        mask.select(0, b)
            .select(0, at::randint(0, tokens, {1}, random).item<int64_t>())
            .fill_(true);
      }
      return mask;
    }
  }
  return {};
}

std::vector<double> values(const Tensor& x) {
  const Tensor dense = x.to(at::kDouble).contiguous();
  const double* data = dense.const_data_ptr<double>();
  return {data, data + dense.numel()};
}

void run_oracle(AttentionData& data) {
  const Tensor q = data.q.to(at::kDouble).contiguous(), k = data.k.to(at::kDouble).contiguous(),
               v = data.v.to(at::kDouble).contiguous(),
               dout = data.dout.to(at::kDouble).contiguous();
  const Tensor mask = data.mask.defined() ? data.mask.to(at::kByte).contiguous() : Tensor();
  AttentionProblem p;
  p.batch = q.size(0);
  p.q_tokens = p.kv_tokens = q.size(1);
  p.q_heads = q.size(2);
  p.kv_heads = k.size(2);
  p.head_dim = q.size(3);
  p.scale = data.scale;
  p.q = q.const_data_ptr<double>();
  p.k = k.const_data_ptr<double>();
  p.v = v.const_data_ptr<double>();
  p.dout = dout.const_data_ptr<double>();
  p.key_mask = mask.defined() ? mask.const_data_ptr<uint8_t>() : nullptr;
  data.reference = attention_oracle(p);
}

}  // namespace

AttentionData draw_attention_data(const AttentionCase& c) {
  if (c.heads < 1 || c.kv_heads < 1 || c.heads % c.kv_heads != 0) {
    bad_input("case '{}': {} query heads over {} KV heads", c.id(), c.heads, c.kv_heads);
  }
  at::Generator random = at::make_generator<at::CPUGeneratorImpl>(c.seed);
  const int64_t batch = c.mesh.dp * c.batch, tokens = c.tokens();
  Tensor q = normal({batch, tokens, c.heads, c.head_dim}, random);
  Tensor k = normal({batch, tokens, c.kv_heads, c.head_dim}, random);
  const Tensor v = normal({batch, tokens, c.kv_heads, c.head_dim}, random);
  const Tensor dout = normal({batch, tokens, c.heads, c.head_dim}, random);
  skew_blocks(q, k, random);
  AttentionData data;
  data.q = q.to(c.dtype), data.k = k.to(c.dtype), data.v = v.to(c.dtype);
  data.dout = dout.to(c.dtype);
  data.mask = draw_mask(c, batch, random);
  data.scale = 1.0 / std::sqrt(static_cast<double>(c.head_dim));
  run_oracle(data);
  return data;
}

AttentionData golden_attention_data(const AttentionCase& c, const AttentionGolden& golden) {
  AttentionData data;
  data.q = golden.q.to(c.dtype), data.k = golden.k.to(c.dtype), data.v = golden.v.to(c.dtype);
  data.dout = golden.cotangent.to(c.dtype);
  data.mask = golden.mask;
  data.scale = golden.scale;
  run_oracle(data);  // also for the magnitudes of the error budget
  if (c.dtype == at::kDouble || c.dtype == at::kFloat) {
    data.reference.out = values(golden.out);
    data.reference.lse = values(golden.lse);
    data.reference.dq = values(golden.dq);
    data.reference.dk = values(golden.dk);
    data.reference.dv = values(golden.dv);
  }
  return data;
}

}  // namespace shardproof::verify
