// What makes a simulated run and a real one differ, and how a rank's results travel.
#include "verify/transport_check.h"

#include "tests/catch.h"

#include <ATen/ATen.h>

#include <limits>

#include "tests/file_support.h"
#include "verify/attention/attention_check.h"
#include "verify/process_rank_world.h"

namespace shardproof::verify {
namespace {

using tests::contains;
using tests::error_text;

CollectiveCall call(const std::string& tag) {
  CollectiveCall c;
  c.group = "ulysses";
  c.number = 3;
  c.kind = CallKind::kReduceScatter;
  c.tag = tag;
  c.dtype = "Float";
  c.send = {4, 4};
  c.receive = {4, 4};
  c.reduce_op = "sum";
  return c;
}

RankResult result() {
  return {{"out", at::arange(6, at::kFloat).view({2, 3})},
          {"lse", at::full({2}, -std::numeric_limits<double>::infinity(), at::kDouble)},
          {"b", at::full({0, 3}, 1, at::kBFloat16)}};
}

TEST_CASE("transport: traces differ in order, number and content", "[transport]") {
  CHECK(trace_difference({call("a"), call("b")}, {call("a"), call("b")}).empty());
  CHECK(contains(trace_difference({call("a"), call("b")}, {call("b"), call("a")}), "collective 0"));
  CHECK(contains(trace_difference({call("a")}, {call("a"), call("b")}),
                 "1 collectives here, 2 in the simulator"));
  CollectiveCall other = call("a");
  other.receive = {4, 5};
  CHECK(!trace_difference({call("a")}, {other}).empty());
}

TEST_CASE("transport: results differ in bits, or by more than rounding", "[transport]") {
  CHECK(result_difference(result(), result(), true).empty());
  RankResult other = result();
  other["out"] = other["out"] * (1 + 1e-6);
  CHECK(contains(result_difference(result(), other, true), "out differs"));
  CHECK(result_difference(result(), other, false).empty());
  other["out"] = result()["out"] * 1.001;
  CHECK(contains(result_difference(result(), other, false), "out differs"));
  other = result();
  other["lse"] = at::zeros({2}, at::kDouble);
  CHECK(contains(result_difference(result(), other, false), "lse differs"));
  other = result();
  other["out"] = other["out"].flatten();
  CHECK(contains(result_difference(result(), other, false), "another shape"));
  other = result();
  other.erase("lse");
  CHECK(contains(result_difference(result(), other, false), "lse is not there"));
  CHECK(contains(result_difference(other, result(), false), "more tensors"));
  other = result();
  other["out"][0][0] = std::numeric_limits<float>::quiet_NaN();
  CHECK(!result_difference(result(), other, false).empty());
}

TEST_CASE("transport: results and calls travel as bytes", "[transport]") {
  const std::string bytes = pack({result(), {call("x"), call("y'")}, "so", "no"});
  const RankReport back = unpack(bytes);
  CHECK(result_difference(result(), back.result, true).empty());
  CHECK(back.result.at("b").sizes() == at::IntArrayRef({0, 3}));
  CHECK(back.calls.size() == 2);
  CHECK(trace_difference(back.calls, {call("x"), call("y'")}).empty());
  CHECK(back.flight_difference == "so");
  CHECK(back.refusal == "no");
  CHECK(
      contains(error_text([&] { unpack(bytes.substr(0, bytes.size() - 1)); }, ErrorKind::kInternal),
               "end after"));
}

TEST_CASE("transport: the backend's own records against ours", "[transport]") {
  CollectiveCall send = call("s");
  send.kind = CallKind::kSend;
  send.send = {12};
  send.receive = {};
  const std::vector<CollectiveCall> calls = {call("a"), send};
  const std::vector<comm::FlightRecord> records = {
      {1, "_reduce_scatter_base", 8, 4}, {2, "send 0->1", 12, 12}, {3, "coalesced", 0, 0}};
  CHECK(flight_difference(calls, records).empty());
  CHECK(contains(flight_difference({call("a")}, records), "1 collectives were issued"));
  auto other = records;
  other[0].input = 9;
  CHECK(contains(flight_difference(calls, other), "collective 0"));
  other = records;
  other[1].name = "recv 0<-1";
  CHECK(contains(flight_difference(calls, other), "collective 1"));
}

// Two simulated worlds, of which one is broken: what a real transport with a fault would look like.
TEST_CASE("transport: a transport that computes otherwise is found", "[transport]") {
  sim::World good(2), bad(2);
  SimRankWorld reference(good), real(bad);
  const AttentionCase c = AttentionCase::parse("attention/joint/ulysses/ulysses2/fp32/textrep.C");
  const auto findings = [&](const sim::FaultPlan& faults) {
    ComparedWorld compared(real, reference);
    AttentionSubject subject;
    subject.faults = faults;
    run_sequence_parallel(c, draw_attention_data(c), subject, compared);
    return compared.findings();
  };
  for (const CheckResult& check : findings({})) {
    INFO(check.detail);
    CHECK(check.status == Status::kPass);
  }
  sim::Fault fault;
  fault.factor = 1 + 1e-6;
  fault.tag = "*gather*";
  const auto broken = findings({fault});
  REQUIRE(broken.size() == 2);
  CHECK(broken[0].status == Status::kPass);
  CHECK(broken[1].name == "bitwise");
  CHECK(broken[1].status == Status::kFail);
}

}  // namespace
}  // namespace shardproof::verify
