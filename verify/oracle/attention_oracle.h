// Attention, forward and backward, in fp64: the reference that every other attention is held to.
//
// Independent of the code under test: Eigen and explicit formulas, no LibTorch, no autograd. With
// x = scale * q k^T over the keys that may be attended to:
//   P = softmax(x)      lse = log(sum(exp(x)))      out = P v
//   dv = P^T dout       dP = dout v^T               dS = P * (dP - rowsum(P * dP))
//   dq = scale * dS k   dk = scale * dS^T q
// Source: Dao et al., FlashAttention (arXiv:2205.14135), appendix B.2 (without dropout). Unlike
// there, rowsum(P * dP) is summed directly instead of through dout and out, which are the same only
// up to rounding.
#pragma once
#include <cstdint>
#include <vector>

namespace shardproof::verify {

// B = batch, Sq = q_tokens, Sk = kv_tokens, H = q_heads, Hk = kv_heads, D = head_dim. Data are
// dense and row-major; a pointer may be null where its tensor has no elements. batch, q_tokens,
// kv_tokens and q_heads may be 0; kv_heads and head_dim may not.
struct AttentionProblem {
  int64_t batch = 0;
  int64_t q_tokens = 0;
  int64_t kv_tokens = 0;
  int64_t q_heads = 0;   // a multiple of kv_heads
  int64_t kv_heads = 0;  // query head h reads key and value head h / (q_heads / kv_heads)
  int64_t head_dim = 0;
  double scale = 0;                   // of the logits, usually 1/sqrt(D)
  const double* q = nullptr;          // [B,Sq,H,D]
  const double* k = nullptr;          // [B,Sk,Hk,D]
  const double* v = nullptr;          // [B,Sk,Hk,D]
  const uint8_t* key_mask = nullptr;  // [B,Sk], non-zero = may be attended to; null = all
  const double* dout = nullptr;       // [B,Sq,H,D], gradient of out; null = forward only
};

// A forward-only problem leaves the gradients and their magnitudes empty. Without query elements
// dout cannot tell, since an empty tensor has no address either: dk and dv are zeros then.
struct AttentionReference {
  std::vector<double> out;  // [B,Sq,H,D]
  std::vector<double> lse;  // [B,H,Sq], natural logarithm, of the scaled logits
  std::vector<double> dq;   // [B,Sq,H,D]
  std::vector<double> dk;   // [B,Sk,Hk,D], summed over the query heads that read the head
  std::vector<double> dv;   // [B,Sk,Hk,D]

  // The size of what is added up, shapes as above: the same formulas on absolute values, every
  // difference a sum. An error budget needs them, because rounding errors scale with the summands
  // and not with the sum that is left after they cancel.
  //   out_abs = P |v|                              dv_abs = P^T |dout|
  //   dS_abs = P * (dP_abs + rowsum(P * dP_abs)),  dP_abs = |dout| |v|^T
  //   dq_abs = |scale| dS_abs |k|                  dk_abs = |scale| dS_abs^T |q|
  std::vector<double> out_abs, dq_abs, dk_abs, dv_abs;
};

// Cost: O(B H Sq Sk D) time on the calling thread; beside problem and result, memory for
// row_block x Sk numbers a few times over, never Sq x Sk. The result does not depend on row_block
// beyond rounding (forward: of one product; dk, dv: of a sum over blocks of rows).
//
// Exact by construction:
// - A masked key is never read: NaN or Inf there changes nothing, and its dk, dv (and magnitudes)
//   are 0.
// - A row without a key to attend to has out = 0, lse = -inf, dq = 0 and adds nothing to dk, dv.
// NaN in one row of q or dout spreads to that row's results only, and to the dk, dv it adds to.
//
// Throws Error: kBadInput for impossible sizes or a scale that is not finite, kInternal for missing
// data or row_block < 1.
AttentionReference attention_oracle(const AttentionProblem& problem, int64_t row_block = 64);

}  // namespace shardproof::verify
