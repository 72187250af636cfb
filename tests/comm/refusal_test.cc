// Tensors and members that a Communicator refuses, and how a Pending behaves. No transport.
#include <ATen/ATen.h>

#include "comm/communicator.h"
#include "comm/tag.h"
#include "tests/file_support.h"

namespace shardproof::comm {
namespace {

using at::Tensor;
using tests::contains;
using tests::error_text;

// Counts its waits and notes their order.
class CountedWork final : public c10d::Work {
 public:
  CountedWork(std::vector<std::string>& events, std::string name)
      : events_(events), name_(std::move(name)) {}
  bool wait(std::chrono::milliseconds) override {
    events_.push_back("wait " + name_);
    return true;
  }

 private:
  std::vector<std::string>& events_;
  std::string name_;
};

// Member 1 of three; notes the calls that reach it. Cannot group calls, as Gloo cannot.
class RecordingBackend final : public c10d::Backend {
 public:
  explicit RecordingBackend(std::vector<std::string>& events)
      : c10d::Backend(1, 3), events_(events) {}
  const std::string getBackendName() const override { return "recording"; }

  using Work = c10::intrusive_ptr<c10d::Work>;
  Work send(std::vector<Tensor>& tensors, int to, int) override {
    return note(fmt::format("send {} to {}", c10::str(tensors[0].sizes()), to));
  }
  Work recv(std::vector<Tensor>& tensors, int from, int) override {
    return note(fmt::format("recv {} from {}", c10::str(tensors[0].sizes()), from));
  }

 private:
  Work note(const std::string& call) {
    events_.push_back(call);
    return c10::make_intrusive<CountedWork>(events_, call.substr(0, 4));
  }
  std::vector<std::string>& events_;
};

Communicator member_1_of_3(std::vector<std::string>& events) {
  return Communicator(c10::make_intrusive<RecordingBackend>(events), "ulysses", {4, 5, 6});
}

// What a call says that is refused; nothing may reach the backend.
template <class Call>
std::string refusal(Call call) {
  std::vector<std::string> events;
  const Communicator group = member_1_of_3(events);
  const CollectiveScope scope("blocks.3/attn");
  const std::string text = error_text([&] { (void)call(group); }, ErrorKind::kInternal);
  CHECK(events.empty());
  return text;
}

void require_named(const std::string& text, const std::string& call, const std::string& shape) {
  INFO(text);
  REQUIRE(contains(text, call + " in group 'ulysses'"));
  REQUIRE(contains(text, "tag 'blocks.3/attn'"));
  REQUIRE(contains(text, "rank 1"));
  REQUIRE(contains(text, shape));
}

}  // namespace

TEST_CASE("a tensor that is not contiguous is refused by every call", "[communicator][refusal]") {
  const Tensor turned = at::zeros({4, 6}).transpose(0, 1);  // [6, 4]
  const auto require = [](const std::string& text, const std::string& call) {
    require_named(text, call, "Float [6, 4]");
    REQUIRE(contains(text, "expected a contiguous tensor"));
    REQUIRE(contains(text, "strides [1, 6]"));
  };
  require(refusal([&](const auto& g) {
            return g.all_to_all(turned, {2, 2, 2}, {2, 2, 2});
          }),
          "all_to_all");
  require(refusal([&](const auto& g) { return g.all_gather(turned, {6, 6, 6}); }), "all_gather");
  require(refusal([&](const auto& g) {
            return g.reduce_scatter(turned, {2, 2, 2});
          }),
          "reduce_scatter");
  require(refusal([&](const auto& g) { return g.all_reduce(turned); }), "all_reduce");
  require(refusal([&](const auto& g) { return g.broadcast(turned, 0); }), "broadcast");
  require(refusal([&](const auto& g) { return g.exchange(turned, 0, {6, 4}, 2); }), "exchange");
}

TEST_CASE("a tensor without rows to cut is refused", "[communicator][refusal]") {
  const Tensor number = at::zeros({}, at::kDouble);
  require_named(refusal([&](const auto& g) { return g.all_reduce(number); }), "all_reduce",
                "Double []");
}

TEST_CASE("a tensor that does not exist is refused", "[communicator][refusal]") {
  require_named(refusal([](const auto& g) { return g.all_reduce(Tensor()); }), "all_reduce",
                "undefined");
}

TEST_CASE("row counts that do not fit are refused", "[communicator][refusal]") {
  const Tensor x = at::zeros({6, 2}, at::kBFloat16);
  const auto require = [](const std::string& text, const char* call) {
    require_named(text, call, "BFloat16 [6, 2]");
  };
  SECTION("all_to_all") {
    const auto split = [&](std::vector<int64_t> send, std::vector<int64_t> receive) {
      return refusal([&](const auto& g) { return g.all_to_all(x, send, receive); });
    };
    require(split({3, 3}, {2, 2, 2}), "all_to_all");
    require(split({2, 2, 2}, {2, 2}), "all_to_all");
    require(split({2, 2, 1}, {2, 2, 2}), "all_to_all");
    require(split({2, 2, 3}, {2, 2, 2}), "all_to_all");
    require(split({8, -1, -1}, {2, 2, 2}), "all_to_all");
    require(split({2, 2, 2}, {2, 2, -1}), "all_to_all");
  }
  SECTION("all_gather") {
    const auto gather = [&](std::vector<int64_t> rows) {
      return refusal([&](const auto& g) { return g.all_gather(x, rows); });
    };
    require(gather({6, 6}), "all_gather");
    require(gather({6, 5, 6}), "all_gather");
    require(gather({6, 6, -1}), "all_gather");
  }
  SECTION("reduce_scatter") {
    const auto scatter = [&](std::vector<int64_t> rows) {
      return refusal([&](const auto& g) { return g.reduce_scatter(x, rows); });
    };
    require(scatter({3, 3}), "reduce_scatter");
    require(scatter({2, 2, 3}), "reduce_scatter");
    require(scatter({4, 4, -2}), "reduce_scatter");
  }
}

TEST_CASE("members that the group does not have are refused", "[communicator][refusal]") {
  const Tensor x = at::zeros({2, 2});
  for (const int member : {-1, 3}) {
    const std::string name = std::to_string(member);
    for (const std::string& text : {refusal([&](const auto& g) { return g.broadcast(x, member); }),
                                    refusal([&](const auto& g) {
                                      return g.exchange(x, member, {2, 2}, 0);
                                    }),
                                    refusal([&](const auto& g) {
                                      return g.exchange(x, 0, {2, 2}, member);
                                    })}) {
      INFO(text);
      CHECK(contains(text, "no member"));
      CHECK(contains(text, name));
    }
  }
}

TEST_CASE("a group and its backend must agree on the size", "[communicator][refusal]") {
  std::vector<std::string> events;
  const std::string text = error_text(
      [&] {
        Communicator(c10::make_intrusive<RecordingBackend>(events), "ring", {0, 1});
      },
      ErrorKind::kInternal);
  CHECK(contains(text, "group 'ring': backend of 3 ranks for 2 members"));
}

TEST_CASE("a group knows its place", "[communicator]") {
  std::vector<std::string> events;
  const Communicator group = member_1_of_3(events);
  CHECK(group.rank() == 1);
  CHECK(group.size() == 3);
  CHECK(group.name() == "ulysses");
  CHECK(group.world_ranks() == std::vector<int>{4, 5, 6});
}

TEST_CASE("an exchange over a backend that cannot group calls sends, receives and waits for both",
          "[communicator]") {
  std::vector<std::string> events;
  const Communicator group = member_1_of_3(events);
  Pending pending = group.exchange(at::zeros({2, 3}), 2, {4, 3}, 0);
  CHECK(events == std::vector<std::string>{"send [2, 3] to 2", "recv [4, 3] from 0"});
  CHECK(pending.wait().sizes() == std::vector<int64_t>{4, 3});
  CHECK(std::count(events.begin(), events.end(), "wait send") == 1);
  CHECK(std::count(events.begin(), events.end(), "wait recv") == 1);
}

TEST_CASE("a pending result waits for its work before it finishes, and only once", "[pending]") {
  std::vector<std::string> events;
  std::vector<c10::intrusive_ptr<c10d::Work>> works = {
      c10::make_intrusive<CountedWork>(events, "a"), c10::make_intrusive<CountedWork>(events, "b")};
  const Tensor arrived = at::arange(4);
  Pending pending(works, arrived, [&](const Tensor& x) {
    events.push_back("finish");
    return x.narrow(0, 1, 2);
  });
  CHECK(events.empty());
  CHECK(at::equal(pending.wait(), at::arange(1, 3)));
  CHECK(events == std::vector<std::string>{"wait a", "wait b", "finish"});
}

TEST_CASE("a pending result without an end step yields the tensor itself", "[pending]") {
  std::vector<std::string> events;
  const Tensor x = at::arange(4);
  Pending pending({c10::make_intrusive<CountedWork>(events, "a")}, x);
  CHECK(pending.wait().is_same(x));
  CHECK(Pending(x).wait().is_same(x));
}

TEST_CASE("a pending result keeps nothing after its wait", "[pending]") {
  Tensor x = at::arange(4);
  Pending pending(x);
  Pending padded({}, x, [](const Tensor& t) { return t.clone(); });
  pending.wait();
  padded.wait();
  CHECK(x.use_count() == 1);
}

}  // namespace shardproof::comm
