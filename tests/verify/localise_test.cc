// Where an error sits: planted at a known place, found there.
#include "verify/attention/localise.h"

#include "tests/catch.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>

#include "verify/attention/attention_data.h"
#include "verify/attention/ownership.h"

namespace shardproof::verify {
namespace {

using at::Tensor;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Two replicas of 2 samples; 6 text and 14 image tokens; 4 query and 2 KV heads on 4 SP ranks. Text
// rows 2,2,1,1; image rows 4,4,3,3.
AttentionCase sample_case() {
  return AttentionCase::parse(
      "attention/joint/hybrid/dp2.ring2.ulysses2/fp64/b2.t6.i14.h4.kv2.d4.emptyrank#3");
}

struct Sample {
  Sample() : c(sample_case()), data(draw_attention_data(c)) {
    out = tensor(data.reference.out, data.q.sizes());
    dk = tensor(data.reference.dk, data.k.sizes());
    lse = tensor(data.reference.lse, {4, 4, 20});
  }
  static Tensor tensor(const std::vector<double>& values, at::IntArrayRef shape) {
    return at::tensor(values, at::kDouble).view(shape);
  }
  Location find_out(const Tensor& result) const {
    return localise(c, TensorRole::kOutput, result, data.reference.out);
  }

  AttentionCase c;
  AttentionData data;
  Tensor out, dk, lse;
};

void check_at(const Location& where, int rank, int head, int64_t begin, int64_t end) {
  CHECK(where.rank == rank);
  CHECK(where.head == head);
  CHECK(where.token_begin == begin);
  CHECK(where.token_end == end);
}

TEST_CASE("localise: one wrong element", "[verify][localise]") {
  const Sample s;
  const Ownership o = derive_ownership(s.c);
  for (int64_t sample = 0; sample < 4; ++sample) {
    for (int64_t token = 0; token < 20; ++token) {
      for (const int64_t head : {0, 3}) {
        Tensor wrong = s.out.clone();
        wrong[sample][token][head][1] += 0.01;
        const int sp_rank = token < 6 ? o.text[static_cast<size_t>(token)].sp_rank
                                      : o.image[static_cast<size_t>(token - 6)].sp_rank;
        INFO("sample " << sample << ", token " << token << ", head " << head);
        check_at(s.find_out(wrong), static_cast<int>(sample / 2) * 4 + sp_rank,
                 static_cast<int>(head), token, token + 1);
      }
    }
  }
}

TEST_CASE("localise: the log-sum-exp has its tokens last", "[verify][localise]") {
  const Sample s;
  Tensor wrong = s.lse.clone();
  wrong[3][2].narrow(0, 10, 3) += 1;  // image tokens 4 to 6, on SP rank 1
  check_at(localise(s.c, TensorRole::kLse, wrong, s.data.reference.lse), 5, 2, 10, 13);
}

TEST_CASE("localise: KV heads are counted as KV heads", "[verify][localise]") {
  const Sample s;
  Tensor wrong = s.dk.clone();
  wrong[0][19][1] += 1;
  check_at(localise(s.c, TensorRole::kGradK, wrong, s.data.reference.dk), 3, 1, 19, 20);
}

TEST_CASE("localise: the rank with most of the error, all of its tokens", "[verify][localise]") {
  const Sample s;
  Tensor wrong = s.out.clone();
  wrong[0].narrow(0, 0, 1) += 0.1;            // rank 0, text
  wrong[1].narrow(0, 2, 2).add_(1);           // rank 1, text
  wrong[1].narrow(0, 10, 4).add_(1);          // rank 1, image
  wrong[2].narrow(0, 14, 1).add_(0.1);        // rank 6, image
  check_at(s.find_out(wrong), 1, -1, 2, 14);  // every head errs alike: none is named
}

TEST_CASE("localise: a head is named if it has most of its rank's error", "[verify][localise]") {
  const Sample s;
  Tensor wrong = s.out.clone();
  wrong[0].narrow(0, 0, 2).select(1, 2) += 1;    // head 2 of tokens 0, 1
  wrong[0].narrow(0, 6, 4).select(1, 1) += 0.1;  // a little elsewhere on the rank
  check_at(s.find_out(wrong), 0, 2, 0, 2);
  wrong[0].narrow(0, 0, 2).select(1, 0) += 1;  // two heads with half of it each
  check_at(s.find_out(wrong), 0, -1, 0, 10);
}

TEST_CASE("localise: what is not finite weighs most", "[verify][localise]") {
  const Sample s;
  for (const double poison : {kNaN, kInf, -kInf}) {
    Tensor wrong = s.out + 100;
    wrong[2][15][1][0] = poison;  // image token 9: SP rank 2 of replica 1
    check_at(s.find_out(wrong), 6, 1, 15, 16);
  }
}

TEST_CASE("localise: rows without a key are right where both are -inf", "[verify][localise]") {
  AttentionCase c =
      AttentionCase::parse("attention/self/ulysses/ulysses2/fp32/b1.i8.h2.kv2.d4.emptyrank#1");
  std::vector<double> oracle(16, 1.0);
  for (int i = 0; i < 4; ++i) oracle[static_cast<size_t>(i)] = -kInf;  // head 0, tokens 0 to 3
  Tensor result = Sample::tensor(oracle, {1, 2, 8}).to(at::kFloat);
  result[0][1][6] = 1.25;
  check_at(localise(c, TensorRole::kLse, result, oracle), 1, 1, 6, 7);
  result[0][0][2] = 0;  // a kernel that says 0 where it should say -inf
  check_at(localise(c, TensorRole::kLse, result, oracle), 0, 0, 2, 3);
}

TEST_CASE("localise: tokens of replicated text belong to the rank that works on them",
          "[verify][localise]") {
  AttentionCase c =
      AttentionCase::parse("attention/joint/ulysses/ulysses2/fp64/b1.t5.i4.h2.kv2.d4.textrep.C#1");
  const AttentionData data = draw_attention_data(c);
  Tensor wrong = Sample::tensor(data.reference.out, data.q.sizes()).clone();
  wrong[0][3] += 1;  // text rows 3 and 2
  check_at(localise(c, TensorRole::kOutput, wrong, data.reference.out), 1, -1, 3, 4);
}

}  // namespace
}  // namespace shardproof::verify
