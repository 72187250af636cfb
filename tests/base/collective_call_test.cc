#include "base/collective_call.h"

#include <functional>
#include <nlohmann/json.hpp>

#include "tests/file_support.h"

namespace shardproof {
namespace {

using tests::contains;

CollectiveCall even(CallKind kind, std::vector<int64_t> send, std::vector<int64_t> receive) {
  CollectiveCall call;
  call.group = "ulysses";
  call.kind = kind;
  call.tag = "blocks.3/attn";
  call.dtype = "Float";
  call.send = std::move(send);
  call.receive = std::move(receive);
  return call;
}

CollectiveCall sum_of(int64_t elements) {
  CollectiveCall call = even(CallKind::kAllReduce, {elements}, {elements});
  call.reduce_op = "sum";
  return call;
}

CollectiveCall send_to(int peer, int64_t elements) {
  CollectiveCall call = even(CallKind::kSend, {elements}, {});
  call.peer = peer;
  return call;
}

CollectiveCall receive_from(int peer, int64_t elements) {
  CollectiveCall call = even(CallKind::kRecv, {}, {elements});
  call.peer = peer;
  return call;
}

// The reason as each of the two sides would give it: whichever is posted last is compared.
void require_mismatch(const CollectiveCall& a, const CollectiveCall& b, const std::string& reason) {
  for (const std::string& why : {mismatch(a, 0, b, 1), mismatch(b, 1, a, 0)}) {
    INFO(why);
    REQUIRE(contains(why, reason));
  }
}

}  // namespace

TEST_CASE("every kind of call has a name of its own", "[collective_call]") {
  const std::vector<std::pair<CallKind, std::string>> names = {
      {CallKind::kAllToAll, "all_to_all"},
      {CallKind::kAllGather, "all_gather"},
      {CallKind::kReduceScatter, "reduce_scatter"},
      {CallKind::kAllReduce, "all_reduce"},
      {CallKind::kBroadcast, "broadcast"},
      {CallKind::kSend, "send"},
      {CallKind::kRecv, "recv"},
      {CallKind::kBarrier, "barrier"}};
  for (const auto& [kind, name] : names) CHECK(to_string(kind) == name);
}

TEST_CASE("a call describes itself with what it has and nothing else", "[collective_call]") {
  CHECK(even(CallKind::kAllToAll, {8, 8}, {4, 12}).describe() ==
        "all_to_all Float send=[8, 8] receive=[4, 12]");
  CHECK(sum_of(3).describe() == "all_reduce Float send=[3] receive=[3] op=sum");
  CHECK(send_to(2, 5).describe() == "send Float send=[5] peer=2");
  CHECK(receive_from(0, 5).describe() == "recv Float receive=[5] peer=0");
  CHECK(CollectiveCall{}.describe() == "barrier");

  CollectiveCall cast = even(CallKind::kBroadcast, {6}, {6});
  cast.root = 0;
  CHECK(cast.describe() == "broadcast Float send=[6] receive=[6] root=0");
}

TEST_CASE("a call is one line of JSON whose keys have a fixed order", "[collective_call]") {
  CollectiveCall call = even(CallKind::kAllToAll, {8, 0}, {4, 4});
  call.number = 7;
  CHECK(call.to_json_line() ==
        R"({"group":"ulysses","call":7,"kind":"all_to_all","tag":"blocks.3/attn","dtype":"Float",)"
        R"("send":[8,0],"receive":[4,4]})");

  CollectiveCall cast = even(CallKind::kBroadcast, {6}, {6});
  cast.root = 0;
  CHECK(nlohmann::json::parse(cast.to_json_line()).at("root") == 0);
  CHECK(!nlohmann::json::parse(cast.to_json_line()).contains("peer"));
  CHECK(nlohmann::json::parse(send_to(2, 5).to_json_line()).at("peer") == 2);
  CHECK(nlohmann::json::parse(sum_of(3).to_json_line()).at("op") == "sum");
}

TEST_CASE("a tag cannot break the line of JSON", "[collective_call]") {
  CollectiveCall call = sum_of(1);
  call.tag = "a\"b\\c\nd'";
  const std::string line = call.to_json_line();
  CHECK(!contains(line, "\n"));
  CHECK(nlohmann::json::parse(line).at("tag") == call.tag);
}

TEST_CASE("calls of one collective fit together", "[collective_call]") {
  const auto require_fit = [](const CollectiveCall& a, const CollectiveCall& b) {
    REQUIRE(mismatch(a, 0, b, 1).empty());
    REQUIRE(mismatch(b, 1, a, 0).empty());
  };
  SECTION("the same call twice") {
    require_fit(sum_of(4), sum_of(4));
    require_fit(CollectiveCall{}, CollectiveCall{});
    require_fit(even(CallKind::kAllGather, {4}, {4, 4}), even(CallKind::kAllGather, {4}, {4, 4}));
    require_fit(even(CallKind::kReduceScatter, {4, 4}, {4}),
                even(CallKind::kReduceScatter, {4, 4}, {4}));
  }
  SECTION("uneven sizes that agree peer by peer") {
    // Member 0 sends 1 to itself and 2 to member 1; member 1 sends 3 and 5.
    require_fit(even(CallKind::kAllToAll, {1, 2}, {1, 3}),
                even(CallKind::kAllToAll, {3, 5}, {2, 5}));
  }
  SECTION("a send and its receive") { require_fit(send_to(1, 9), receive_from(0, 9)); }
  SECTION("number and group are not compared: the rendezvous pairs by them") {
    CollectiveCall other = sum_of(4);
    other.number = 9;
    other.group = "elsewhere";
    require_fit(sum_of(4), other);
  }
}

TEST_CASE("only the sizes between the two members count", "[collective_call]") {
  // Of three members, 0 and 2 agree with each other; what each exchanges with 1 differs.
  const CollectiveCall first = even(CallKind::kAllToAll, {7, 1, 2}, {7, 1, 3});
  const CollectiveCall third = even(CallKind::kAllToAll, {3, 9, 5}, {2, 9, 5});
  CHECK(mismatch(first, 0, third, 2).empty());
  CHECK(!mismatch(first, 0, third, 1).empty());
}

TEST_CASE("every kind of mismatch is found from both sides and says what differs",
          "[collective_call]") {
  const auto changed = [](CollectiveCall call, const std::function<void(CollectiveCall&)>& change) {
    change(call);
    return call;
  };
  SECTION("kind") {
    require_mismatch(sum_of(4), even(CallKind::kAllGather, {4}, {4, 4}), "kinds differ");
    require_mismatch(sum_of(4), CollectiveCall{}, "barrier");
  }
  SECTION("dtype") {
    require_mismatch(sum_of(4), changed(sum_of(4), [](auto& c) { c.dtype = "BFloat16"; }),
                     "dtypes differ");
    require_mismatch(send_to(1, 4),
                     changed(receive_from(0, 4), [](auto& c) { c.dtype = "BFloat16"; }),
                     "dtypes differ");
  }
  SECTION("root") {
    const CollectiveCall cast =
        changed(even(CallKind::kBroadcast, {4}, {4}), [](auto& c) { c.root = 0; });
    require_mismatch(cast, changed(cast, [](auto& c) { c.root = 1; }), "roots differ");
  }
  SECTION("reduce operation") {
    require_mismatch(sum_of(4), changed(sum_of(4), [](auto& c) { c.reduce_op = "avg"; }),
                     "reduce operations differ");
  }
  SECTION("size of what all members share") {
    require_mismatch(sum_of(4), sum_of(5), "sizes differ");
    require_mismatch(even(CallKind::kBroadcast, {4}, {4}), even(CallKind::kBroadcast, {5}, {5}),
                     "sizes differ");
  }
  SECTION("size of one member's message") {
    const CollectiveCall right = even(CallKind::kAllToAll, {4, 4}, {4, 4});
    require_mismatch(right, even(CallKind::kAllToAll, {4, 4}, {3, 4}),
                     "member 0 sends 4 elements to member 1, which expects 3");
    require_mismatch(right, even(CallKind::kAllToAll, {5, 4}, {4, 4}),
                     "member 1 sends 5 elements to member 0, which expects 4");
    require_mismatch(even(CallKind::kAllGather, {4}, {4, 4}),
                     even(CallKind::kAllGather, {5}, {5, 5}), "sizes differ");
    require_mismatch(even(CallKind::kReduceScatter, {4, 4}, {4}),
                     even(CallKind::kReduceScatter, {6, 6}, {6}), "sizes differ");
    require_mismatch(send_to(1, 4), receive_from(0, 6), "sizes differ");
  }
  SECTION("tag") {
    require_mismatch(sum_of(4), changed(sum_of(4), [](auto& c) { c.tag = "blocks.3/attn'"; }),
                     "tags differ: 'blocks.3/attn");
    require_mismatch(send_to(1, 4), changed(receive_from(0, 4), [](auto& c) { c.tag = "other"; }),
                     "tags differ");
  }
}

}  // namespace shardproof
