// The collectives that a case must issue: what is missing, added or of another size is noticed.
#include "verify/attention/expected_trace.h"

#include "tests/catch.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>

#include "tests/file_support.h"
#include "verify/attention/attention_check.h"
#include "verify/suites/attention_suite.h"

namespace shardproof::verify {
namespace {

using at::Tensor;
using tests::contains;

CheckResult trace_of(const AttentionCase& c, sim::World& world) {
  return check_trace(c, derive_ownership(c), SimRankWorld(world));
}

// What `fn` makes of the case's calls, on every rank.
CheckResult trace_after(const AttentionCase& c,
                        const std::function<void(sim::RankContext&, const comm::Mesh&)>& fn) {
  sim::World world(c.mesh.world());
  world.run([&](sim::RankContext& rank) {
    const comm::Mesh mesh(rank, c.mesh);
    fn(rank, mesh);
  });
  return trace_of(c, world);
}

struct Step {
  bool forward = true, backward = true;
};

// Attention as the plan says, forward and backward.
void attend(const plan::AttentionPlan& plan, const comm::Mesh& mesh, int64_t batch, int64_t dim,
            Step step = {}) {
  const attention::SequenceParallelAttention attention(
      plan, mesh, attention::make_local_attention("auto", at::kCPU, at::kFloat, false));
  std::vector<attention::StreamQkv> inputs;
  for (const plan::StreamPlan& stream : plan.streams) {
    const int64_t rows = stream.local_rows[static_cast<size_t>(mesh.sp_rank())];
    const auto leaf = [&](int64_t heads) {
      return at::ones({batch, rows, heads, dim}).requires_grad_(true);
    };
    inputs.push_back({leaf(plan.q_heads), leaf(plan.kv_heads), leaf(plan.kv_heads)});
  }
  const auto result = attention(inputs);
  if (!step.backward) return;
  std::vector<Tensor> ones;
  for (const Tensor& out : result.streams) ones.push_back(at::ones_like(out));
  torch::autograd::backward(result.streams, ones);
}

AttentionCase case_called(const std::string& words) {
  return AttentionCase::parse("attention/" + words);
}

const char* const kCases[] = {
    "self/local/dp1/fp32/b1.d4",
    "self/ulysses/ulysses2/fp32/b1.d4",
    "joint/ulysses/ulysses3/fp32/b2.d4.t4.i7.h5.kv5.headpad",
    "joint/ulysses/ulysses4/fp32/b1.d4.t5.i8.h8.kv2.textrep.C",
    "joint/ulysses/ulysses2/fp32/b1.d4.t5.i8.textrep.A",
    "self/ring/ring3/fp32/b1.d4.i10",
    "self/allgather/ring3/fp32/b1.d4.i10",
    "joint/hybrid/ring2.ulysses2/fp32/b1.d4.t3.i9.h3.headuneven",
    "joint/hybrid_allgather/dp2.ring2.ulysses2/fp32/b1.d4.t3.i9",
};

TEST_CASE("expected trace: the product issues what a case must issue", "[verify][trace]") {
  for (const char* words : kCases) {
    const AttentionCase c = case_called(words);
    INFO(c.id());
    const CheckResult check = trace_after(c, [&](sim::RankContext&, const comm::Mesh& mesh) {
      attend(c.make_plan(), mesh, c.batch, c.head_dim);
    });
    INFO(check.detail);
    CHECK(check.name == "trace");
    CHECK(check.status == Status::kPass);
  }
}

TEST_CASE("expected trace: a bypassed collective is noticed", "[verify][trace]") {
  for (const char* words : kCases) {
    const AttentionCase c = case_called(words);
    if (c.mesh.sp() == 1) continue;
    INFO(c.id());
    const CheckResult nothing = trace_after(c, [](sim::RankContext&, const comm::Mesh&) {});
    CHECK(nothing.status == Status::kFail);
    CHECK(contains(nothing.detail, "issued 0 calls"));
    const CheckResult forward_only = trace_after(c, [&](sim::RankContext&, const comm::Mesh& mesh) {
      attend(c.make_plan(), mesh, c.batch, c.head_dim, {.backward = false});
    });
    INFO(forward_only.detail);
    CHECK(forward_only.status == Status::kFail);
  }
}

TEST_CASE("expected trace: one call too many is noticed", "[verify][trace]") {
  for (const char* words : kCases) {
    const AttentionCase c = case_called(words);
    if (c.mesh.sp() == 1) continue;
    INFO(c.id());
    for (const bool another_kind : {false, true}) {
      const CheckResult check = trace_after(c, [&](sim::RankContext&, const comm::Mesh& mesh) {
        attend(c.make_plan(), mesh, c.batch, c.head_dim);
        if (another_kind) {
          mesh.sp().barrier();
        } else {
          attend(c.make_plan(), mesh, c.batch, c.head_dim, {.backward = false});
        }
      });
      INFO(check.detail);
      CHECK(check.status == Status::kFail);
      if (another_kind) CHECK(contains(check.detail, "barrier sp; expected none"));
    }
  }
}

// Counts alone would not see that a message is too short.
TEST_CASE("expected trace: all-to-alls of another size are noticed", "[verify][trace]") {
  const AttentionCase c = case_called("joint/ulysses/ulysses4/fp32/b1.d4.t8.i8.h8.kv4");
  for (const char* other : {"joint/ulysses/ulysses4/fp32/b1.d4.t8.i12.h8.kv4",
                            "joint/ulysses/ulysses4/fp32/b1.d4.t8.i8.h8.kv8",
                            "joint/ulysses/ulysses4/fp32/b1.d8.t8.i8.h8.kv4",
                            "joint/ulysses/ulysses4/fp32/b2.d4.t8.i8.h8.kv4",
                            "joint/ulysses/ulysses4/fp32/b1.d4.t8.i8.h12.kv4"}) {
    const AttentionCase sent = case_called(other);
    INFO(sent.id());
    const CheckResult check = trace_after(c, [&](sim::RankContext&, const comm::Mesh& mesh) {
      attend(sent.make_plan(), mesh, sent.batch, sent.head_dim);
    });
    CHECK(check.status == Status::kFail);
    CHECK(contains(check.detail, "elements by all_to_all"));
  }
}

// The numbers are right, and yet it is not what was asked for.
TEST_CASE("expected trace: another way to the same numbers is noticed", "[verify][trace]") {
  at::set_num_threads(1);
  struct Bypass {
    const char* words;
    std::function<void(plan::AttentionPlan&)> edit;
    const char* detail;
  };
  const std::vector<Bypass> all = {
      {"self/ring/ring2/fp64/default",
       [](plan::AttentionPlan& p) { p.ring_mode = plan::RingMode::kAllGather; }, "recv ring"},
      {"self/allgather/ring2/fp64/default",
       [](plan::AttentionPlan& p) { p.ring_mode = plan::RingMode::kRotate; }, "all_gather ring"},
  };
  for (const Bypass& bypass : all) {
    const AttentionCase c = case_called(bypass.words);
    AttentionSubject subject;
    subject.edit_plan = bypass.edit;
    WorldPool worlds(sim::WorldOptions{});
    const CaseResult result = check_attention(c, subject, worlds);
    INFO(result.id);
    CHECK(result.status == Status::kFail);
    CHECK(result.first_wrong.empty());
    REQUIRE(result.checks.size() >= 2);
    CHECK(result.checks.back().name == "trace");
    CHECK(contains(result.checks.back().detail, bypass.detail));
  }
}

}  // namespace
}  // namespace shardproof::verify
