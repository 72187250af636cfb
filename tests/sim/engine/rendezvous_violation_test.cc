// What ends a run, how soon and with which words. After each failed run another one must work.
#include <functional>
#include <regex>

#include "tests/sim/engine/plain_world.h"
#include "tests/sim/engine/violation.h"
#include "tests/sim/engine/watchdog.h"

namespace shardproof::sim {
namespace {

using tests::all_ranks;
using tests::Buffer;
using tests::expect;
using tests::PlainPart;
using tests::PlainRank;
using tests::PlainWorld;
using tests::require_text;
using tests::require_violation;
using tests::violation_of;
using tests::Watchdog;

using Program = std::function<void(PlainRank&)>;

void require_usable(PlainWorld& world) {
  std::vector<double> totals(static_cast<size_t>(world.size()));
  world.run([&](PlainRank& rank) {
    const int64_t group = rank.join("again", all_ranks(world.size()));
    const Buffer one = {1};
    Buffer total(1);
    rank.wait(rank.sum(group, "again", one, total));
    totals[static_cast<size_t>(rank.rank())] = total[0];
  });
  REQUIRE(totals == std::vector<double>(totals.size(), world.size()));
}

// Runs the program under several schedules; all must end in the same kind of violation, say all of
// `parts`, and leave the world usable.
void require_end(int ranks, ViolationKind kind, const std::vector<std::string>& parts,
                 const Program& program, ErrorKind category = ErrorKind::kViolation) {
  Watchdog watchdog;
  for (uint64_t seed = 0; seed < 12; ++seed) {
    PlainWorld world(ranks, 1 + static_cast<int>(seed % 3), seed);
    const CollectiveError error = violation_of([&] { world.run(program); });
    INFO("schedule seed " << seed << "\n" << error.what());
    require_violation(error, kind);
    require_text(error, parts);
    require_text(error, {"rank  state     group         call  tag"});  // the table
    REQUIRE(error.kind() == category);
    // Who waits, waits for somebody.
    REQUIRE(!std::regex_search(error.what(), std::regex("missing: rank ?(\n|$)")));
    require_usable(world);
  }
}

// Two ranks; `change` edits the call of rank 1 before it is posted.
void require_mismatch(const CollectiveCall& call,
                      const std::function<void(CollectiveCall&)>& change,
                      const std::string& reason) {
  require_end(2, ViolationKind::kMismatch,
              {reason, "collective mismatch in group 'world' (ranks 0,1), call 1",
               "rank 0 issued " + call.describe(), "rank 1 issued "},
              [&](PlainRank& rank) {
                const int64_t group = rank.join("world", {0, 1});
                rank.wait(rank.barrier(group, "before"));
                CollectiveCall mine = call;
                if (rank.rank() == 1) change(mine);
                rank.wait(rank.post(group, mine, std::make_shared<PlainPart>(nullptr, nullptr)));
              });
}

CollectiveCall call_of(CallKind kind, std::vector<int64_t> send, std::vector<int64_t> receive) {
  CollectiveCall call = PlainRank::described(kind, "blocks.0/attn");
  call.send = std::move(send);
  call.receive = std::move(receive);
  return call;
}

}  // namespace

TEST_CASE("calls that differ end the run with both of them", "[rendezvous][violation]") {
  CollectiveCall sum = call_of(CallKind::kAllReduce, {4}, {4});
  sum.reduce_op = "sum";
  SECTION("kind") {
    require_mismatch(
        sum, [](auto& c) { c.kind = CallKind::kAllGather; }, "kinds differ");
  }
  SECTION("dtype") {
    require_mismatch(
        sum, [](auto& c) { c.dtype = "BFloat16"; }, "dtypes differ");
  }
  SECTION("size") {
    require_mismatch(
        sum, [](auto& c) { c.send = c.receive = {5}; }, "sizes differ");
  }
  SECTION("reduce operation") {
    require_mismatch(
        sum, [](auto& c) { c.reduce_op = "max"; }, "reduce operations differ");
  }
  SECTION("tag") {
    require_mismatch(
        sum, [](auto& c) { c.tag = "blocks.1/attn"; }, "tags differ");
  }
  SECTION("root") {
    CollectiveCall cast = call_of(CallKind::kBroadcast, {4}, {4});
    cast.root = 0;
    require_mismatch(
        cast, [](auto& c) { c.root = 1; }, "roots differ");
  }
}

TEST_CASE("uneven sizes are matched peer by peer", "[rendezvous][violation]") {
  // Row i: what rank i sends to each; rank 2 expects one element too few of rank 1.
  const std::vector<std::vector<int64_t>> sent = {{1, 2, 3}, {4, 5, 6}, {7, 8, 9}};
  require_end(3, ViolationKind::kMismatch,
              {"sizes differ: member 1 sends 6 elements to member 2, which expects 5",
               "rank 1 issued all_to_all", "rank 2 issued all_to_all"},
              [&](PlainRank& rank) {
                const auto me = static_cast<size_t>(rank.rank());
                CollectiveCall call = call_of(CallKind::kAllToAll, sent[me], {});
                for (const auto& row : sent) call.receive.push_back(row[me]);
                if (me == 2) --call.receive[1];
                const int64_t group = rank.join("world", all_ranks(3));
                rank.wait(rank.post(group, call, std::make_shared<PlainPart>(nullptr, nullptr)));
              });
}

TEST_CASE("a send and a receive that differ", "[rendezvous][violation]") {
  const auto exchange = [](size_t sent, size_t received, const char* receive_tag) {
    return [=](PlainRank& rank) {
      const int64_t group = rank.join("ring", {0, 1, 2});
      const Buffer input(sent);
      Buffer output(received);
      if (rank.rank() == 1) rank.wait(rank.send(group, 2, "kv.rotate", input));
      if (rank.rank() == 2) rank.wait(rank.receive(group, 1, receive_tag, output));
    };
  };
  SECTION("size") {
    require_end(3, ViolationKind::kMismatch,
                {"sizes differ", "group 'ring' (ranks 1,2), call 0", "rank 1 issued send",
                 "rank 2 issued recv"},
                exchange(4, 5, "kv.rotate"));
  }
  SECTION("tag") {
    require_end(3, ViolationKind::kMismatch, {"tags differ", "tag 'kv.rotate'", "tag 'dkv.rotate'"},
                exchange(4, 4, "dkv.rotate"));
  }
}

TEST_CASE("a rank that returns early is named by those who wait", "[rendezvous][violation]") {
  require_end(3, ViolationKind::kDeadlock,
              {"deadlock: rank 1 returned without making the barrier in group 'world', call 1, tag "
               "'second'",
               "missing: rank 1", "returned"},
              [](PlainRank& rank) {
                const int64_t group = rank.join("world", all_ranks(3));
                rank.wait(rank.barrier(group, "first"));
                if (rank.rank() == 1) return;
                rank.wait(rank.barrier(group, "second"));
              });
}

TEST_CASE("a deadlock's message in full", "[rendezvous][violation]") {
  Watchdog watchdog;
  PlainWorld world(4, 1);
  const CollectiveError error = violation_of([&] {
    world.run([](PlainRank& rank) {
      if (rank.rank() == 3) return;
      const int64_t group = rank.join("fsdp", {0, 1, 2});
      rank.wait(rank.barrier(group, "begin"));
      const Buffer input(6);
      Buffer output(6);
      if (rank.rank() < 2) {
        const auto me = static_cast<size_t>(rank.rank());
        rank.wait(rank.all_to_all(group, 3, me, "blocks.7/gather", input, output));
      }
    });
  });
  CHECK(std::string(error.what()) ==
        "deadlock: rank 2 returned without making the all_to_all in group 'fsdp', call 1, tag "
        "'blocks.7/gather', that others wait for\n"
        "  rank  state     group         call  tag                              call and who is "
        "missing\n"
        "  0     waiting   fsdp             1  blocks.7/gather                  all_to_all Double "
        "send=[2, 2, 2] receive=[2, 2, 2]; missing: rank 2\n"
        "  1     waiting   fsdp             1  blocks.7/gather                  all_to_all Double "
        "send=[2, 2, 2] receive=[2, 2, 2]; missing: rank 2\n"
        "  2     returned  fsdp             0  begin                            barrier (its last "
        "call)\n"
        "  3     returned ");
}

TEST_CASE("a rank that throws ends the others' waits", "[rendezvous][violation]") {
  const auto program = [](const std::function<void()>& fail) {
    return [=](PlainRank& rank) {
      const int64_t group = rank.join("world", all_ranks(4));
      rank.wait(rank.barrier(group, "first"));
      if (rank.rank() == 2) fail();
      rank.wait(rank.barrier(group, "second"));
    };
  };
  SECTION("with a category of ours, which is kept") {
    require_end(4, ViolationKind::kRankFailed, {"rank 2 failed: no such file", "failed"},
                program([] { bad_input("no such file"); }), ErrorKind::kBadInput);
  }
  SECTION("with any other exception") {
    require_end(4, ViolationKind::kRankFailed, {"rank 2 failed: out of luck"},
                program([] { throw std::runtime_error("out of luck"); }), ErrorKind::kInternal);
  }
}

TEST_CASE("sends that wait for each other", "[rendezvous][violation]") {
  require_end(3, ViolationKind::kDeadlock, {"circular wait", "send Double", "tag", "kv.rotate"},
              [](PlainRank& rank) {
                const int64_t group = rank.join("ring", all_ranks(3));
                const Buffer input(2);
                Buffer output(2);
                rank.wait(rank.send(group, (rank.rank() + 1) % 3, "kv.rotate", input));
                rank.wait(rank.receive(group, (rank.rank() + 2) % 3, "kv.rotate", output));
              });
}

TEST_CASE("the same ring in one step per rank is right", "[rendezvous][violation]") {
  Watchdog watchdog;
  PlainWorld world(3);
  world.run([](PlainRank& rank) {
    const int64_t group = rank.join("ring", all_ranks(3));
    const Buffer input(2);
    Buffer output(2);
    rank.rendezvous().begin_step(rank.rank());
    auto sent = rank.send(group, (rank.rank() + 1) % 3, "kv.rotate", input);
    auto received = rank.receive(group, (rank.rank() + 2) % 3, "kv.rotate", output);
    rank.rendezvous().end_step(rank.rank());
    rank.wait(sent);
    rank.wait(received);
  });
}

TEST_CASE("ranks that wait in two groups for each other", "[rendezvous][violation]") {
  require_end(2, ViolationKind::kDeadlock,
              {"circular wait", "dp", "sp", "missing: rank 0", "missing: rank 1"},
              [](PlainRank& rank) {
                const int64_t dp = rank.join("dp", {0, 1}), sp = rank.join("sp", {0, 1});
                rank.wait(rank.barrier(rank.rank() == 0 ? dp : sp, "x"));
                rank.wait(rank.barrier(rank.rank() == 0 ? sp : dp, "x"));
              });
}

TEST_CASE("orders that contradict each other are an error although the run finishes",
          "[rendezvous][violation]") {
  SECTION("two ranks, two groups") {
    Watchdog watchdog;
    PlainWorld world(2);
    const CollectiveError error = violation_of([&] {
      world.run([](PlainRank& rank) {
        const int64_t dp = rank.join("dp", {0, 1}), sp = rank.join("sp", {0, 1});
        const bool first = rank.rank() == 0;
        auto one = rank.barrier(first ? dp : sp, first ? "grads" : "tokens");
        auto two = rank.barrier(first ? sp : dp, first ? "tokens" : "grads");
        rank.wait(one);
        rank.wait(two);
      });
    });
    require_violation(error, ViolationKind::kOrder);
    require_text(error, {"rank 0 issues barrier of group 'dp', call 0, tag 'grads' before barrier "
                         "of group 'sp', call 0, tag 'tokens'",
                         "rank 1 issues barrier of group 'sp', call 0, tag 'tokens' before barrier "
                         "of group 'dp', call 0, tag 'grads'"});
    require_usable(world);
  }
  SECTION("three ranks, no two of which contradict each other") {
    require_end(
        3, ViolationKind::kOrder,
        {"rank 0 issues", "rank 1 issues", "rank 2 issues", "'pair0'", "'pair1'", "'pair2'"},
        [](PlainRank& rank) {
          // Rank r is in pair r (with r+1) and in pair r-1; it begins with its own.
          const auto join = [&](int p) {
            return rank.join(fmt::format("pair{}", p), {p, (p + 1) % 3});
          };
          auto one = rank.barrier(join(rank.rank()), "x");
          auto two = rank.barrier(join((rank.rank() + 2) % 3), "x");
          rank.wait(one);
          rank.wait(two);
        });
  }
  SECTION("sends before receives, waited for at the end") {
    require_end(2, ViolationKind::kOrder, {"send of group 'ring'", "before"}, [](PlainRank& rank) {
      const int64_t group = rank.join("ring", {0, 1});
      const Buffer input(2);
      Buffer output(2);
      auto sent = rank.send(group, 1 - rank.rank(), "x", input);
      auto received = rank.receive(group, 1 - rank.rank(), "x", output);
      rank.wait(received);
      rank.wait(sent);
    });
  }
}

TEST_CASE("a call that is never waited for", "[rendezvous][violation]") {
  const auto leave_open = [](int calls) {
    return [calls](PlainRank& rank) {
      const int64_t group = rank.join("world", {0, 1});
      std::vector<PlainRank::Ticket> tickets;
      for (int i = 0; i < 3; ++i) tickets.push_back(rank.barrier(group, "grads"));
      for (int i = rank.rank() == 1 ? calls : 0; i < 3; ++i) {
        rank.wait(tickets[static_cast<size_t>(i)]);
      }
    };
  };
  SECTION("one") {
    require_end(2, ViolationKind::kUnwaited,
                {"rank 1 returned without waiting for its barrier in group 'world', call 0, tag "
                 "'grads'\n"},
                leave_open(1));
  }
  SECTION("several are counted") {
    require_end(2, ViolationKind::kUnwaited, {"call 0, tag 'grads' (2 calls in all)"},
                leave_open(2));
  }
}

TEST_CASE("of several ranks that do not wait the first to return is named",
          "[rendezvous][violation]") {
  Watchdog watchdog;
  PlainWorld world(2, 1);
  const CollectiveError error = violation_of([&] {
    world.run([](PlainRank& rank) { rank.barrier(rank.join("world", {0, 1}), "grads"); });
  });
  require_violation(error, ViolationKind::kUnwaited);
  require_text(error, {"rank 0 returned without waiting"});
}

TEST_CASE("a buffer that is overwritten in flight", "[rendezvous][violation]") {
  const auto overwrite = [](const std::function<void(Buffer&)>& write) {
    return [=](PlainRank& rank) {
      const int64_t group = rank.join("world", {0, 1});
      Buffer input = {1, 2, 3, 4}, output(4);
      auto ticket = rank.all_to_all(group, 2, static_cast<size_t>(rank.rank()), "blocks.2/qkv",
                                    input, output);
      if (rank.rank() == 1) write(input);
      rank.wait(ticket);
    };
  };
  require_end(2, ViolationKind::kRace,
              {"race: rank 1 overwrote the input of its all_to_all in group 'world', call 0, tag "
               "'blocks.2/qkv', before waiting for it"},
              overwrite([](Buffer& input) { input[2] = -input[2]; }));
}

TEST_CASE("a rank that swallows the error does not save the run", "[rendezvous][violation]") {
  require_end(2, ViolationKind::kMismatch, {"kinds differ"}, [](PlainRank& rank) {
    const int64_t group = rank.join("world", {0, 1});
    const Buffer input(2);
    Buffer output(2);
    for (int attempt = 0; attempt < 2; ++attempt) {
      try {
        if (rank.rank() == 0) {
          rank.wait(rank.barrier(group, "x"));
        } else {
          rank.wait(rank.sum(group, "x", input, output));
        }
        expect(false, "an error on both ranks, again and again");
      } catch (const CollectiveError&) {
      }
    }
  });
}

TEST_CASE("what ends a run first stays its reason", "[rendezvous][violation]") {
  // The rank that throws makes the others throw as well, for another reason.
  require_end(
      3, ViolationKind::kRankFailed, {"rank 1 failed: the cause"},
      [](PlainRank& rank) {
        const int64_t group = rank.join("world", all_ranks(3));
        if (rank.rank() == 1) throw std::runtime_error("the cause");
        try {
          rank.wait(rank.barrier(group, "x"));
        } catch (const CollectiveError&) {
          throw std::runtime_error("the effect");
        }
      },
      ErrorKind::kInternal);
}

TEST_CASE("groups that cannot be are refused", "[rendezvous][violation]") {
  const auto join = [](std::vector<int> ranks) {
    return [ranks](PlainRank& rank) {
      if (rank.rank() == 0) rank.join("odd", ranks);
    };
  };
  for (const auto& ranks : std::vector<std::vector<int>>{{0, 0}, {0, 2}, {0, -1}, {1}, {}}) {
    require_end(2, ViolationKind::kRankFailed, {"group 'odd' of rank 0", "distinct ranks of 0..1"},
                join(ranks), ErrorKind::kBadInput);
  }
}

TEST_CASE("a message to nobody is refused", "[rendezvous][violation]") {
  for (const int peer : {-1, 2}) {
    require_end(
        2, ViolationKind::kRankFailed, {"group 'ring'", "tag 'x'", "rank 0", "0..1"},
        [&](PlainRank& rank) {
          const int64_t group = rank.join("ring", {0, 1});
          const Buffer input(2);
          if (rank.rank() == 0) rank.wait(rank.send(group, peer, "x", input));
        },
        ErrorKind::kBadInput);
  }
}

}  // namespace shardproof::sim
