// What a rank may do with its buffers, and when: poison until the wait, checksums in flight, reuse
// after it; and calls of c10d that the simulator refuses.
#include <cmath>

#include "comm/tag.h"
#include "tests/file_support.h"
#include "tests/sim/engine/watchdog.h"
#include "tests/sim/tensor_support.h"

namespace shardproof::sim {
namespace {

using at::Tensor;
using comm::Communicator;
using tests::all_nan;
using tests::expect;
using tests::expect_same;
using tests::require_text;
using tests::require_violation;
using tests::violation_of;
using tests::Watchdog;
using tests::whole_world;

const std::vector<at::ScalarType> kTypes = {at::kDouble, at::kFloat, at::kBFloat16, at::kLong};

using Backend = c10::intrusive_ptr<c10d::Backend>;

// Calls the backend itself, where a Communicator would allocate the output.
Backend backend_of(RankContext& rank) {
  return rank.create("raw", tests::world_ranks(rank.world_size()));
}

}  // namespace

TEST_CASE("an output is poison from the call to the wait", "[delivery]") {
  for (const at::ScalarType type : kTypes) {
    Watchdog watchdog;
    WorldOptions options;
    options.cores = 2;
    World world(2, options);
    world.run([&](RankContext& rank) {
      const Backend backend = backend_of(rank);
      Tensor input = at::full({4, 3}, rank.rank() + 1, type), output = at::zeros({8, 3}, type);
      const auto poisoned = [&] {
        return at::isFloatingType(type) ? all_nan(output)
                                        : at::equal(output, at::full({8, 3}, -1, type));
      };
      const auto work = backend->_allgather_base(output, input, {});
      expect(poisoned(), "poison after the call");
      whole_world(rank).barrier();  // by now every member has posted
      expect(poisoned(), "poison until the wait, although the data could be there");
      work->wait();
      expect_same(output, at::cat({at::full({4, 3}, 1, type), at::full({4, 3}, 2, type)}),
                  "the gathered rows");
    });
  }
}

TEST_CASE("an in-place call is poison from the call to the wait", "[delivery]") {
  Watchdog watchdog;
  World world(3);
  world.run([](RankContext& rank) {
    const Communicator group = whole_world(rank);
    const Tensor x = at::full({4}, 1.0), y = at::full({4}, rank.rank() + 5.0);
    comm::Pending sum = group.all_reduce(x);
    comm::Pending cast = group.broadcast(y, 1);
    expect(all_nan(x), "the sum before its wait");
    expect(rank.rank() == 1 ? !at::isnan(y).any().item<bool>() : all_nan(y),
           "the root's tensor stays, the others' are poison");
    sum.wait();
    cast.wait();
    expect_same(x, at::full({4}, 3.0), "the sum");
    expect_same(y, at::full({4}, 6.0), "the root's value");
  });
}

TEST_CASE("without delivery checks nothing is poisoned and races pass", "[delivery]") {
  Watchdog watchdog;
  WorldOptions options;
  options.delivery_checks = false;
  World world(2, options);
  world.run([](RankContext& rank) {
    const Backend backend = backend_of(rank);
    Tensor input = at::ones({2}), output = at::zeros({4});
    const auto work = backend->_allgather_base(output, input, {});
    expect_same(output, at::zeros({4}), "untouched");
    work->wait();
    expect_same(output, at::ones({4}), "gathered");
  });
}

TEST_CASE("an input that is overwritten in flight is a race", "[delivery]") {
  using Write = std::function<void(const Tensor&)>;
  // Each changes every value, or few, or only signs, or only the order.
  const std::vector<std::pair<const char*, Write>> writes = {
      {"add", [](const Tensor& x) { x.add_(1); }},
      {"one element", [](const Tensor& x) { x.view({-1})[5].fill_(0); }},
      {"last element", [](const Tensor& x) { x.view({-1})[-1].fill_(0); }},
      {"negate", [](const Tensor& x) { x.neg_(); }},
      {"negate one", [](const Tensor& x) { x.view({-1})[1].neg_(); }},
      {"swap rows", [](const Tensor& x) { x.copy_(x.flip(0)); }},
      {"swap columns", [](const Tensor& x) { x.copy_(x.flip(1)); }}};
  const auto start = [](const Communicator& group, const Tensor& x, const std::string& call) {
    if (call == "all_to_all") return group.all_to_all(x, {2, 2, 2}, {2, 2, 2});
    if (call == "all_gather") return group.all_gather(x, {6, 6, 6});
    if (call == "reduce_scatter") return group.reduce_scatter(x, {2, 2, 2});
    if (call == "broadcast") return group.broadcast(x, 1);
    return group.exchange(x, (group.rank() + 1) % 3, x.sizes(), (group.rank() + 2) % 3);
  };
  World world(3);
  for (const at::ScalarType type : kTypes) {
    for (const std::string call :
         {"all_to_all", "all_gather", "reduce_scatter", "broadcast", "send"}) {
      for (const auto& [name, write] : writes) {
        Watchdog watchdog;
        INFO(call << ", " << name << ", " << c10::toString(type));
        const CollectiveError error = violation_of([&] {
          world.run([&](RankContext& rank) {
            const Communicator group = whole_world(rank);
            const comm::CollectiveScope scope("blocks.4/qkv");
            const Tensor x = at::arange(1, 25, type).view({6, 4}) + 30 * rank.rank();
            comm::Pending pending = start(group, x, call);
            if (rank.rank() == 1) write(x);
            pending.wait();
          });
        });
        require_violation(error, ViolationKind::kRace);
        require_text(error, {"race: rank 1 overwrote the input of its " + call +
                             " in group 'world', call 0, tag 'blocks.4/qkv'"});
      }
    }
  }
}

TEST_CASE("a tensor may be used again as soon as its own wait is over", "[delivery]") {
  for (const uint64_t seed : {0, 1, 2, 3, 4, 5}) {
    for (const bool checks : {true, false}) {
      Watchdog watchdog;
      WorldOptions options;
      options.schedule_seed = seed;
      options.delivery_checks = checks;
      options.cores = 3;
      World world(3, options);
      world.run([](RankContext& rank) {
        const Communicator group = whole_world(rank), late = whole_world(rank, "late");
        const int r = rank.rank();
        Tensor kept = at::full({3}, r + 1.0), moved = at::full({3}, r + 11.0);
        const Tensor to_sum = at::full({3}, r + 21.0), to_send = at::full({3}, r + 31.0);
        comm::Pending a = group.all_to_all(kept, {1, 1, 1}, {1, 1, 1});
        comm::Pending b = group.all_gather(std::move(moved), {3, 3, 3});
        comm::Pending c = group.all_reduce(to_sum);
        comm::Pending d = group.exchange(to_send, (r + 1) % 3, {3}, (r + 2) % 3);
        if (r == 0) late.barrier();  // rank 0 waits last: the others have gone on by then
        const Tensor got_a = a.wait(), got_b = b.wait(), got_c = c.wait().clone(), got_d = d.wait();
        kept.fill_(-1);
        kept = Tensor();
        to_sum.fill_(-1);
        to_send.fill_(-1);
        if (r != 0) late.barrier();
        expect_same(got_a, at::arange(1, 4, at::kFloat), "all_to_all");
        expect_same(got_b, at::arange(11, 14, at::kFloat).repeat_interleave(3), "all_gather");
        expect_same(got_c, at::full({3}, 66.0), "all_reduce");
        expect_same(got_d, at::full({3}, (r + 2) % 3 + 31.0), "exchange");
      });
    }
  }
}

TEST_CASE("a call whose wait is over holds no buffer but its result", "[delivery]") {
  Watchdog watchdog;
  World world(2);
  world.run([](RankContext& rank) {
    const Backend backend = backend_of(rank);
    Tensor input = at::ones({2}), output = at::zeros({4});
    const auto work = backend->_allgather_base(output, input, {});
    work->wait();
    whole_world(rank).barrier();  // all have read
    expect(input.use_count() == 1, "the input is the caller's alone");
    expect(work->result().size() == 1 && work->result()[0].is_same(output), "the result");
  });
}

TEST_CASE("a result is no alias of another rank's tensor", "[delivery]") {
  Watchdog watchdog;
  World world(3);
  world.run([](RankContext& rank) {
    const Communicator group = whole_world(rank);
    const Tensor x = at::full({3}, rank.rank() * 1.0);
    const Tensor gathered = group.all_gather(x, {3, 3, 3}).wait();
    const Tensor total = group.all_reduce(at::ones({3})).wait();
    gathered.fill_(100 + rank.rank());
    total.fill_(100 + rank.rank());
    group.barrier();
    expect_same(gathered, at::full({9}, 100.0 + rank.rank()), "the rank's own gathered rows");
    expect_same(total, at::full({3}, 100.0 + rank.rank()), "the rank's own sum");
    expect_same(x, at::full({3}, rank.rank() * 1.0), "the rank's own input");
  });
}

TEST_CASE("parameters may be broadcast and summed as they are", "[delivery]") {
  Watchdog watchdog;
  World world(2);
  world.run([](RankContext& rank) {
    const Communicator group = whole_world(rank);
    const Tensor weight = at::full({3}, rank.rank() + 1.0).requires_grad_();
    expect_same(group.broadcast(weight, 1).wait().detach(), at::full({3}, 2.0), "the root's");
    expect(weight.is_leaf() && weight.requires_grad(), "still a parameter");
    expect_same(group.all_reduce(weight).wait().detach(), at::full({3}, 4.0), "the sum");
    expect(weight.is_leaf() && !weight.grad().defined(), "no graph was recorded");
    const Tensor gathered = group.all_gather(weight, {3, 3}).wait();
    expect(!gathered.requires_grad(), "the plain calls are not differentiable");
  });
}

TEST_CASE("an input may be a part of the output", "[delivery]") {
  for (const bool checks : {true, false}) {
    Watchdog watchdog;
    WorldOptions options;
    options.delivery_checks = checks;
    World world(3, options);
    world.run([](RankContext& rank) {
      const Backend backend = backend_of(rank);
      const int r = rank.rank();
      Tensor gathered = at::full({6, 2}, -1.0);
      Tensor own = gathered.narrow(0, 2 * r, 2);
      own.fill_(r + 1);
      backend->_allgather_base(gathered, own, {})->wait();
      expect_same(gathered, at::arange(1, 4, at::kFloat).repeat_interleave(4).view({6, 2}),
                  "gathered in place");
      Tensor scattered = at::arange(3, at::kFloat).repeat_interleave(2) + 10 * r;
      Tensor share = scattered.narrow(0, 2 * r, 2);
      backend->_reduce_scatter_base(share, scattered, {})->wait();
      expect_same(share, at::full({2}, 30.0 + 3 * r), "scattered in place");
    });
  }
}

TEST_CASE("calls that a backend cannot carry out are refused", "[delivery][refusal]") {
  World world(3);
  const auto error_of = [&](const std::function<void(const Backend&)>& call) {
    Watchdog watchdog;
    const CollectiveError error = violation_of([&] {
      world.run([&](RankContext& rank) {
        const comm::CollectiveScope scope("site");
        call(backend_of(rank));
      });
    });
    require_violation(error, ViolationKind::kRankFailed);
    CHECK(error.kind() == ErrorKind::kBadInput);
    require_text(error, {"group 'raw'", "tag 'site'"});
    return std::string(error.what());
  };
  const auto all_to_all = [&](std::vector<int64_t> out, std::vector<int64_t> in) {
    return error_of([=](const Backend& backend) {
      Tensor input = at::ones({6}), output = at::ones({6});
      auto out_splits = out, in_splits = in;
      backend->alltoall_base(output, input, out_splits, in_splits, {});
    });
  };
  using tests::contains;
  CHECK(contains(all_to_all({2, 2, 2}, {3, 3}), "[3, 3]"));
  CHECK(contains(all_to_all({2, 2, 2}, {2, 2, 3}), "[2, 2, 3]"));
  CHECK(contains(all_to_all({2, 2, 1}, {2, 2, 2}), "[2, 2, 1]"));
  CHECK(contains(all_to_all({2, 2, 2}, {8, -1, -1}), "[8, -1, -1]"));
  CHECK(contains(error_of([](const Backend& backend) {
                   Tensor input = at::ones({3}), output = at::ones({8});
                   backend->_allgather_base(output, input, {});
                 }),
                 "all_gather"));
  CHECK(contains(error_of([](const Backend& backend) {
                   Tensor input = at::ones({8}), output = at::ones({3});
                   backend->_reduce_scatter_base(output, input, {});
                 }),
                 "reduce_scatter"));
  CHECK(contains(error_of([](const Backend& backend) {
                   std::vector<Tensor> tensors = {at::ones({4})};
                   c10d::BroadcastOptions options;
                   options.rootRank = 3;
                   backend->broadcast(tensors, options);
                 }),
                 "no member 3"));
  CHECK(contains(error_of([](const Backend& backend) {
                   std::vector<Tensor> tensors = {at::ones({4})};
                   backend->send(tensors, -1, 0);
                 }),
                 "no member -1"));
  CHECK(contains(error_of([](const Backend& backend) {
                   std::vector<Tensor> tensors = {at::ones({4, 2}).transpose(0, 1)};
                   backend->allreduce(tensors, {});
                 }),
                 "contiguous"));
}

}  // namespace shardproof::sim
