// Collectives over virtual ranks, against values that are computed directly.
#include "comm/communicator.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <numeric>

#include "comm/tag.h"
#include "tests/sim/engine/watchdog.h"
#include "tests/sim/tensor_support.h"

namespace shardproof::comm {
namespace {

using at::Tensor;
using tests::expect;
using tests::expect_same;
using tests::Watchdog;
using tests::whole_world;

using Rows = std::vector<int64_t>;

const std::vector<int> kSizes = {1, 2, 3, 4, 8};
const std::vector<at::ScalarType> kTypes = {at::kDouble, at::kFloat, at::kBFloat16, at::kLong};

// Runs `check(group, dtype)` on every rank of worlds of all sizes, in all dtypes.
void on_all_worlds(const std::function<void(const Communicator&, at::ScalarType)>& check) {
  for (const int n : kSizes) {
    sim::World world(n);
    for (const at::ScalarType type : kTypes) {
      Watchdog watchdog;
      INFO(n << " ranks, " << c10::toString(type));
      world.run([&](sim::RankContext& rank) { check(whole_world(rank), type); });
    }
  }
}

// A row that names its origin: [from*8+to, k], integers that every dtype holds exactly.
Tensor rows_from_to(int from, int to, int64_t count, at::ScalarType type) {
  Tensor rows = at::empty({count, 2}, at::kDouble);
  for (int64_t k = 0; k < count; ++k) {
    rows[k][0] = from * 8 + to;
    rows[k][1] = k;
  }
  return rows.to(type);
}

Tensor stack_rows(const std::vector<Tensor>& parts) { return at::cat(parts, 0).contiguous(); }

int64_t total(const Rows& rows) { return std::accumulate(rows.begin(), rows.end(), int64_t{0}); }

// What rank `from` adds at row k, column c; sums over 8 ranks round in bf16.
double addend(int from, int64_t k, int64_t c) {
  return (from * 37 + static_cast<int>(k) * 11 + static_cast<int>(c) * 5) % 101 - 50;
}

Tensor addends(int from, int64_t first, int64_t count, at::ScalarType type) {
  Tensor x = at::empty({count, 3}, at::kDouble);
  for (int64_t k = 0; k < count; ++k) {
    for (int64_t c = 0; c < 3; ++c) x[k][c] = addend(from, first + k, c);
  }
  return x.to(type);
}

// The reduction over n ranks, in fp64 (exact for these integers) and rounded once.
Tensor reduced(int n, int64_t first, int64_t count, at::ScalarType type, Reduce op) {
  Tensor result = addends(0, first, count, at::kDouble);
  for (int from = 1; from < n; ++from) {
    const Tensor x = addends(from, first, count, at::kDouble);
    result = op == Reduce::kMax ? at::maximum(result, x) : result + x;
  }
  // A mean is computed in fp32 and rounded to 16 bits after that.
  const at::ScalarType wide = type == at::kBFloat16 ? at::kFloat : type;
  if (op == Reduce::kAverage) result = result.to(wide) / static_cast<double>(n);
  return result.to(type);
}

void all_to_all_with(const Communicator& group, at::ScalarType type,
                     const std::function<int64_t(int, int)>& rows) {
  Rows send, receive;
  std::vector<Tensor> sent, expected;
  for (int other = 0; other < group.size(); ++other) {
    send.push_back(rows(group.rank(), other));
    receive.push_back(rows(other, group.rank()));
    sent.push_back(rows_from_to(group.rank(), other, send.back(), type));
    expected.push_back(rows_from_to(other, group.rank(), receive.back(), type));
  }
  const Tensor got = group.all_to_all(stack_rows(sent), send, receive).wait();
  expect_same(got, stack_rows(expected), "all_to_all");
}

}  // namespace

TEST_CASE("all_to_all with equal rows", "[communicator]") {
  on_all_worlds([](const Communicator& group, at::ScalarType type) {
    all_to_all_with(group, type, [](int, int) { return 3; });
  });
}

TEST_CASE("all_to_all with unequal rows", "[communicator]") {
  on_all_worlds([](const Communicator& group, at::ScalarType type) {
    all_to_all_with(group, type, [](int from, int to) { return (from * 3 + to * 5) % 4; });
  });
}

TEST_CASE("all_to_all with ranks that send or receive nothing", "[communicator]") {
  on_all_worlds([](const Communicator& group, at::ScalarType type) {
    const int last = group.size() - 1;
    all_to_all_with(group, type, [=](int from, int to) { return from == 0 || to == last ? 0 : 2; });
    all_to_all_with(group, type, [](int, int) { return 0; });
  });
}

TEST_CASE("all_gather with equal, unequal and no rows", "[communicator]") {
  const std::vector<std::function<int64_t(int)>> cuts = {
      [](int) { return 3; }, [](int r) { return (r * 2 + 1) % 5; }, [](int r) { return r % 2; },
      [](int) { return 0; }};
  on_all_worlds([&](const Communicator& group, at::ScalarType type) {
    for (const auto& cut : cuts) {
      Rows rows;
      std::vector<Tensor> parts;
      for (int r = 0; r < group.size(); ++r) {
        rows.push_back(cut(r));
        parts.push_back(rows_from_to(r, 0, rows.back(), type));
      }
      const Tensor mine = parts[static_cast<size_t>(group.rank())];
      expect_same(group.all_gather(mine, rows).wait(), stack_rows(parts), "all_gather");
    }
  });
}

TEST_CASE("reduce_scatter with equal, unequal and no rows", "[communicator]") {
  const std::vector<std::function<int64_t(int)>> cuts = {
      [](int) { return 2; }, [](int r) { return (r * 2 + 1) % 5; }, [](int r) { return r % 2; },
      [](int) { return 0; }};
  on_all_worlds([&](const Communicator& group, at::ScalarType type) {
    for (const Reduce op : {Reduce::kSum, Reduce::kAverage, Reduce::kMax}) {
      if (op == Reduce::kAverage && type == at::kLong) continue;
      for (const auto& cut : cuts) {
        Rows rows;
        for (int r = 0; r < group.size(); ++r) rows.push_back(cut(r));
        const int64_t first = total({rows.begin(), rows.begin() + group.rank()});
        const Tensor got =
            group.reduce_scatter(addends(group.rank(), 0, total(rows), type), rows, op).wait();
        expect_same(got,
                    reduced(group.size(), first, rows[static_cast<size_t>(group.rank())], type, op),
                    "reduce_scatter");
        expect(got.is_contiguous(), "a contiguous result");
      }
    }
  });
}

TEST_CASE("all_reduce, in place", "[communicator]") {
  on_all_worlds([](const Communicator& group, at::ScalarType type) {
    for (const Reduce op : {Reduce::kSum, Reduce::kAverage, Reduce::kMax}) {
      if (op == Reduce::kAverage && type == at::kLong) continue;
      const Tensor x = addends(group.rank(), 0, 5, type);
      const Tensor got = group.all_reduce(x, op).wait();
      expect(got.is_same(x), "the tensor itself");
      expect_same(x, reduced(group.size(), 0, 5, type, op), "all_reduce");
    }
    const Tensor nothing = addends(group.rank(), 0, 0, type);
    expect(group.all_reduce(nothing).wait().numel() == 0, "nothing stays nothing");
  });
}

TEST_CASE("broadcast from every root, in place", "[communicator]") {
  on_all_worlds([](const Communicator& group, at::ScalarType type) {
    for (int root = 0; root < group.size(); ++root) {
      const Tensor x = rows_from_to(group.rank(), 0, 4, type);
      const Tensor got = group.broadcast(x, root).wait();
      expect(got.is_same(x), "the tensor itself");
      expect_same(x, rows_from_to(root, 0, 4, type), "broadcast");
    }
  });
}

TEST_CASE("exchange around a ring, in both directions and with oneself", "[communicator]") {
  on_all_worlds([](const Communicator& group, at::ScalarType type) {
    const int n = group.size();
    for (const int step : {1, n - 1, n}) {
      const int to = (group.rank() + step) % n, from = (group.rank() + n - step % n) % n;
      // Every rank sends another number of rows.
      const Tensor mine = rows_from_to(group.rank(), to, group.rank() + 1, type);
      const Tensor want = rows_from_to(from, group.rank(), from + 1, type);
      expect_same(group.exchange(mine, to, want.sizes(), from).wait(), want, "exchange");
      expect_same(mine, rows_from_to(group.rank(), to, group.rank() + 1, type), "what was sent");
    }
  });
}

TEST_CASE("a barrier waits for all", "[communicator]") {
  for (const int n : kSizes) {
    Watchdog watchdog;
    sim::World world(n);
    std::atomic<int> come{0};
    world.run([&](sim::RankContext& rank) {
      const Communicator group = whole_world(rank);
      ++come;
      group.barrier();
      expect(come == n, "all ranks before the barrier");
    });
  }
}

TEST_CASE("a group of one answers with what it was given", "[communicator]") {
  const Communicator alone;
  CHECK(alone.size() == 1);
  CHECK(alone.rank() == 0);
  const Tensor x = at::arange(6, at::kDouble).view({3, 2});
  CHECK(alone.all_to_all(x, {3}, {3}).wait().is_same(x));
  CHECK(alone.all_gather(x, {3}).wait().is_same(x));
  CHECK(alone.reduce_scatter(x, {3}).wait().is_same(x));
  CHECK(alone.all_reduce(x).wait().is_same(x));
  CHECK(alone.broadcast(x, 0).wait().is_same(x));
  CHECK(alone.exchange(x, 0, x.sizes(), 0).wait().is_same(x));
  alone.barrier();
  CHECK(at::equal(x, at::arange(6, at::kDouble).view({3, 2})));
}

TEST_CASE("several calls may be in flight, waited for in any order", "[communicator]") {
  Watchdog watchdog;
  sim::World world(3);
  world.run([](sim::RankContext& rank) {
    const Communicator group = whole_world(rank);
    const auto mine = [&](int call) {
      return at::full({1, 2}, rank.rank() * 10 + call, at::kLong);
    };
    std::vector<Pending> pending;
    for (int call = 0; call < 4; ++call) pending.push_back(group.all_gather(mine(call), {1, 1, 1}));
    for (const int call : {2, 0, 3, 1}) {
      const Tensor got = pending[static_cast<size_t>(call)].wait();
      for (int r = 0; r < 3; ++r)
        expect(got[r][0].item<int64_t>() == r * 10 + call, "its own call");
    }
  });
}

TEST_CASE("a call carries the thread's tag and the group's name", "[communicator]") {
  Watchdog watchdog;
  sim::World world(2);
  world.run([](sim::RankContext& rank) {
    const Communicator group = whole_world(rank, "ulysses");
    CollectiveScope block("blocks.0");
    CollectiveScope site("gather");
    Pending pending = group.all_gather(at::zeros({1, 2}), {1, 1});
    CollectiveScope later("later");  // the tag is that of the call, not of the wait
    pending.wait();
  });
  for (const int rank : {0, 1}) {
    REQUIRE(world.calls(rank).size() == 1);
    CHECK(world.calls(rank)[0].tag == "blocks.0/gather");
    CHECK(world.calls(rank)[0].group == "ulysses");
    CHECK(world.calls(rank)[0].describe() == "all_gather Float send=[2] receive=[2, 2]");
  }
}

}  // namespace shardproof::comm
