// Failing cases become as small as they can be.
#include "verify/shrink.h"

#include "tests/catch.h"

#include "verify/suites/attention_suite.h"

namespace shardproof::verify {
namespace {

AttentionCase large_case() {
  return AttentionCase::parse(
      "attention/joint/hybrid/dp2.ring2.ulysses3/bf16/"
      "b3.t9.i25.h6.kv2.d32.scattered.textrep.tokenpad.headpad.C.strided#123");
}

// Counts how often it is asked.
struct Predicate {
  std::function<bool(const AttentionCase&)> holds;
  int calls = 0;
  bool operator()(const AttentionCase& c) {
    ++calls;
    return holds(c);
  }
};

AttentionCase shrunk(const AttentionCase& c, Predicate& predicate, int budget = 60) {
  return shrink(
      c, [&](const AttentionCase& smaller) { return predicate(smaller); }, budget);
}

TEST_CASE("shrink: only what the failure needs is left", "[verify][shrink]") {
  Predicate p{[](const AttentionCase& c) { return c.heads >= 3 && c.mask != MaskKind::kNone; }};
  const AttentionCase small = shrunk(large_case(), p);
  CHECK(small.id() ==
        "attention/self/local/dp1.ring1.ulysses1/bf16/b1.t0.i1.h3.kv3.d1.scattered#123");
  CHECK(p.calls <= 60);
}

TEST_CASE("shrink: other failures keep what they need", "[verify][shrink]") {
  Predicate ring{[](const AttentionCase& c) { return c.mesh.ring >= 2 && c.tokens() >= 5; }};
  CHECK(shrunk(large_case(), ring).id() ==
        "attention/self/ring/dp1.ring2.ulysses1/bf16/b1.t0.i5.h1.kv1.d1#123");
  Predicate text{[](const AttentionCase& c) {
    return c.text >= 2 && c.text_placement == plan::StreamPlacement::kReplicated &&
           c.mesh.sp() >= 2;
  }};
  const AttentionCase small = shrunk(large_case(), text);
  CHECK(small.text == 2);
  CHECK(small.mesh.sp() == 2);
  CHECK(small.mesh.dp == 1);
  CHECK(small.batch == 1);
  CHECK(small.mask == MaskKind::kNone);
  CHECK(!small.strided);
  Predicate dp{[](const AttentionCase& c) { return c.mesh.dp == 2; }};
  CHECK(shrunk(large_case(), dp).mesh == comm::MeshShape{2, 1, 1});
}

TEST_CASE("shrink: every case that is tried can be built", "[verify][shrink]") {
  for (const AttentionCase& c : random_attention_cases({}, 5, 200)) {
    Predicate p{[](const AttentionCase& smaller) {
      smaller.make_plan();  // throws where it cannot
      CHECK(AttentionCase::parse(smaller.id()).id() == smaller.id());
      return smaller.heads >= 2 || smaller.mesh.sp() > 2;
    }};
    const AttentionCase small = shrunk(c, p, 1000);
    CHECK(p.holds(c) == p.holds(small));
    if (p.holds(c)) CHECK(small.tokens() == 1);
    CHECK(small.seed == c.seed);
    CHECK(small.dtype == c.dtype);
  }
}

TEST_CASE("shrink: the budget is respected", "[verify][shrink]") {
  for (int budget = 0; budget <= 80; ++budget) {
    Predicate always{[](const AttentionCase&) { return true; }};
    const AttentionCase small = shrunk(large_case(), always, budget);
    CHECK(always.calls <= budget);
    if (budget == 0) CHECK(small.id() == large_case().id());
    Predicate never{[](const AttentionCase&) { return false; }};
    CHECK(shrunk(large_case(), never, budget).id() == large_case().id());
    CHECK(never.calls <= budget);
  }
  Predicate always{[](const AttentionCase&) { return true; }};
  shrunk(large_case(), always);
  CHECK(always.calls <= 60);  // the documented default
}

TEST_CASE("shrink: what cannot be smaller stays as it is", "[verify][shrink]") {
  const AttentionCase least = AttentionCase::parse("attention/self/local/dp1/fp64/b1.i1.h1.d1#4");
  Predicate always{[](const AttentionCase&) { return true; }};
  CHECK(shrunk(least, always).id() == least.id());
  CHECK(always.calls == 0);
}

}  // namespace
}  // namespace shardproof::verify
