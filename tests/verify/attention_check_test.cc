// What the checks beside the numbers notice: a fault for each, planted through the subject's seams.
#include "verify/attention/attention_check.h"

#include "tests/catch.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cmath>
#include <limits>

#include "tests/file_support.h"

namespace shardproof::verify {
namespace {

using at::Tensor;
using attention::AttentionGradients;
using attention::AttentionOutput;
using tests::contains;

CaseResult check(const char* id, const AttentionSubject& subject) {
  at::set_num_threads(1);  // bitwise claims are made for one thread
  WorldPool worlds(sim::WorldOptions{});
  return check_attention(AttentionCase::parse(id), subject, worlds);
}

const CheckResult* find(const CaseResult& result, std::string_view name, Status status) {
  for (const CheckResult& c : result.checks) {
    if (c.name == name && c.status == status) return &c;
  }
  return nullptr;
}

void require_failed_check(const CaseResult& result, const char* name, const char* detail) {
  INFO(result.id << ": " << result.reason);
  CHECK(result.status == Status::kFail);
  const CheckResult* failed = find(result, name, Status::kFail);
  REQUIRE(failed);
  INFO(failed->detail);
  CHECK(contains(failed->detail, detail));
}

TEST_CASE("attention check: a correct case passes every check that applies", "[verify][check]") {
  const CaseResult result = check("attention/joint/ulysses/ulysses2/fp32/ragged", {});
  CHECK(result.status == Status::kPass);
  for (const char* name : {"coverage", "trace", "bitwise"}) {
    INFO(name);
    CHECK(find(result, name, Status::kPass));
  }
  REQUIRE(result.tensors.size() == 5);
  const char* const order[] = {"output", "lse", "q:grad", "k:grad", "v:grad"};
  for (size_t i = 0; i < 5; ++i) CHECK(result.tensors[i].name == order[i]);
}

// One unit in the last place of one element is far within the budget, but not the same bits.
class OneBitOff final : public attention::LocalAttention {
 public:
  explicit OneBitOff(AttentionSubject::Local inner) : inner_(std::move(inner)) {}
  std::string name() const override { return inner_->name(); }
  AttentionOutput forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask,
                          double scale) const override {
    AttentionOutput result = inner_->forward(q, k, v, mask, scale);
    const Tensor element = result.out[0][0][0][0];
    element.fill_(std::nextafter(element.item<float>(), std::numeric_limits<float>::max()));
    return result;
  }
  AttentionGradients backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                              const Tensor& out, const Tensor& lse, const Tensor& mask,
                              double scale) const override {
    return inner_->backward(dout, q, k, v, out, lse, mask, scale);
  }

 private:
  AttentionSubject::Local inner_;
};

TEST_CASE("attention check: 'bitwise' sees one unit in the last place", "[verify][check]") {
  AttentionSubject subject;
  subject.wrap_local = [](AttentionSubject::Local local, int rank) -> AttentionSubject::Local {
    if (rank != 1) return local;
    return std::make_shared<OneBitOff>(std::move(local));
  };
  const CaseResult result = check("attention/self/ulysses/ulysses2/fp32/default", subject);
  require_failed_check(result, "bitwise", "output: 1 of 3072 elements differ");
  for (const TensorResult& t : result.tensors) CHECK(t.status == Status::kPass);
  // Where shards are not even, other bits are not wrong.
  CHECK(check("attention/self/ulysses/ulysses2/fp32/i23", subject).status == Status::kPass);
}

TEST_CASE("attention check: 'coverage' audits the plan", "[verify][check]") {
  AttentionSubject subject;
  subject.edit_plan = [](plan::AttentionPlan& p) {
    std::swap(p.block_tokens[0][0], p.block_tokens[0][1]);
  };
  // Without a mask nobody reads the damaged list, and all numbers are right.
  const CaseResult result = check("attention/self/ring/ring2/fp64/default", subject);
  require_failed_check(result, "coverage", "plan: ring rank 0");
  for (const TensorResult& t : result.tensors) CHECK(t.status == Status::kPass);
}

TEST_CASE("attention check: replicated outputs must be alike on all ranks", "[verify][check]") {
  AttentionSubject subject;
  subject.faults.push_back(
      {.kind = sim::FaultKind::kScale, .tag = "text.gather", .rank = 1, .factor = 1 + 1e-15});
  const CaseResult result = check("attention/joint/ulysses/ulysses2/fp64/textrep.C", subject);
  require_failed_check(result, "coverage",
                       "rank 1: the replicated output of stream 'text' differs from rank 0's");
}

TEST_CASE("attention check: pad rows must be zeros", "[verify][check]") {
  AttentionSubject subject;
  subject.edit_plan = [](plan::AttentionPlan& p) {  // pads take part as if they were tokens
    plan::StreamPlan& image = p.streams[0];
    image.tokens = 14;
    image.shards = {{0, 7}, {7, 14}};
    p.block_tokens[1].push_back(13);
  };
  const CaseResult result = check("attention/self/ring/ring2/fp64/i13.tokenpad", subject);
  require_failed_check(result, "coverage", "pad rows of stream 'image' are not zero");
  CHECK(result.first_wrong == "output");
}

TEST_CASE("attention check: elements that must be zero are looked at one by one",
          "[verify][check]") {
  class Leak final : public attention::LocalAttention {
   public:
    explicit Leak(AttentionSubject::Local inner) : inner_(std::move(inner)) {}
    std::string name() const override { return inner_->name(); }
    AttentionOutput forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask,
                            double scale) const override {
      return inner_->forward(q, k, v, mask, scale);
    }
    AttentionGradients backward(const Tensor& dout, const Tensor& q, const Tensor& k,
                                const Tensor& v, const Tensor& out, const Tensor& lse,
                                const Tensor& mask, double scale) const override {
      AttentionGradients g = inner_->backward(dout, q, k, v, out, lse, mask, scale);
      g.dv = g.dv.masked_fill(g.dv.eq(0), 1e-40);  // far below any norm
      return g;
    }

   private:
    AttentionSubject::Local inner_;
  };
  AttentionSubject subject;
  subject.wrap_local = [](AttentionSubject::Local local, int) -> AttentionSubject::Local {
    return std::make_shared<Leak>(std::move(local));
  };
  const CaseResult result =
      check("attention/joint/ulysses/ulysses2/fp64/b1.t8.h2.d4.ragged#3", subject);
  require_failed_check(result, "coverage", "v:grad");
  CHECK(result.first_wrong == "v:grad");
}

TEST_CASE("attention check: a rank that dies ends the case", "[verify][check]") {
  AttentionSubject subject;
  subject.faults.push_back({.kind = sim::FaultKind::kKill, .tag = "qkv.seq_to_head'", .rank = 1});
  const CaseResult result = check("attention/self/ulysses/ulysses2/fp32/default", subject);
  require_failed_check(result, "trace", "killed");
  CHECK(result.tensors.empty());
}

// Replica 1's ranks take part in replica 0's numbers only if somebody mixes the groups up.
TEST_CASE("attention check: each replica has data of its own", "[verify][check]") {
  AttentionSubject subject;
  subject.faults.push_back(
      {.kind = sim::FaultKind::kScale, .tag = "out.head_to_seq", .rank = 3, .factor = 2});
  const CaseResult result = check("attention/self/ulysses/dp2.ulysses2/fp64/default", subject);
  CHECK(result.status == Status::kFail);
  CHECK(result.first_wrong == "output");
  REQUIRE(result.tensors[0].where);
  CHECK(result.tensors[0].where->rank == 3);
}

}  // namespace
}  // namespace shardproof::verify
