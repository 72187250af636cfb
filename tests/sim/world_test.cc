// Whole runs over tensors: every schedule gives the same bytes, backward passes may communicate,
// failures end the run and leave the world usable.
#include "sim/world.h"

#include <ATen/Parallel.h>
#include <c10/core/AutogradState.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <set>
#include <thread>

#include "comm/mesh.h"
#include "comm/tag.h"
#include "tests/file_support.h"
#include "tests/sim/engine/watchdog.h"
#include "tests/sim/tensor_support.h"

namespace shardproof::sim {
namespace {

using at::Tensor;
using comm::CollectiveScope;
using comm::Communicator;
using comm::MarkedScope;
using tests::contains;
using tests::error_text;
using tests::expect;
using tests::expect_same;
using tests::group_of;
using tests::require_text;
using tests::require_violation;
using tests::violation_of;
using tests::Watchdog;
using tests::whole_world;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

const Communicator& group_at(int64_t address) {
  return *reinterpret_cast<const Communicator*>(address);
}
int64_t address_of(const Communicator& group) { return reinterpret_cast<int64_t>(&group); }

// [2k, ...] -> [2k, ...] over a pair, k rows for each; its own adjoint.
struct Swap : torch::autograd::Function<Swap> {
  static Tensor apply_to(const Tensor& x, const Communicator& pair) {
    const std::vector<int64_t> rows(2, x.size(0) / 2);
    return pair.all_to_all(x, rows, rows).wait();
  }
  static Tensor forward(AutogradContext* context, const Tensor& x, int64_t pair) {
    context->saved_data["pair"] = pair;
    context->saved_data["path"] = comm::current_path();
    return apply_to(x, group_at(pair));
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const MarkedScope scope(context->saved_data["path"].toStringRef(), comm::kAdjointMark);
    const auto& pair = group_at(context->saved_data["pair"].toInt());
    return {apply_to(grads[0].contiguous(), pair), Tensor()};
  }
};

// The sum over a group; the adjoint of a sum whose value every member uses is a sum.
struct Sum : torch::autograd::Function<Sum> {
  static Tensor forward(AutogradContext* context, const Tensor& x, int64_t group) {
    context->saved_data["group"] = group;
    context->saved_data["path"] = comm::current_path();
    return group_at(group).all_reduce(x.clone()).wait();
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const MarkedScope scope(context->saved_data["path"].toStringRef(), comm::kAdjointMark);
    const auto& group = group_at(context->saved_data["group"].toInt());
    return {group.all_reduce(grads[0].clone()).wait(), Tensor()};
  }
};

Tensor swap(const Tensor& x, const Communicator& pair) { return Swap::apply(x, address_of(pair)); }
Tensor sum(const Tensor& x, const Communicator& group) { return Sum::apply(x, address_of(group)); }

// sum over `group` of swap(x)^2, recomputed in the backward: a backward inside a backward.
struct Recomputed : torch::autograd::Function<Recomputed> {
  static Tensor compute(const Tensor& x, const Communicator& pair, const Communicator& row) {
    const CollectiveScope scope("inner");
    const Tensor y = swap(x, pair);
    return sum(y * y, row);
  }
  static Tensor forward(AutogradContext* context, const Tensor& x, int64_t pair, int64_t row) {
    context->save_for_backward({x});
    context->saved_data["pair"] = pair;
    context->saved_data["row"] = row;
    return compute(x, group_at(pair), group_at(row));
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const at::AutoGradMode with_graph(true);
    const Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    const MarkedScope scope("recomputed", comm::kRecomputeMark);
    const Tensor y = compute(x, group_at(context->saved_data["pair"].toInt()),
                             group_at(context->saved_data["row"].toInt()));
    return {torch::autograd::grad({y}, {x}, {grads[0]})[0], Tensor(), Tensor()};
  }
};

// Rank r's leaf, [4, 2], small integers: all results below are exact in fp32.
Tensor leaf(int rank) { return at::arange(8, at::kFloat).view({4, 2}) + 10.0 * rank; }

struct Results {
  Tensor swapped, total, received, gradient, shard;
};

// all_to_all on pairs, all-reduce on rows, their adjoints inside one backward, a ring exchange that
// is in flight meanwhile, and the gradient's reduce-scatter.
Results mixed_program(RankContext& rank, bool recompute) {
  const comm::Mesh mesh(rank, {1, 2, 2});
  const Communicator& pair = mesh.ulysses();
  const Communicator& row = mesh.ring();
  const int r = rank.rank();
  Results results;
  const Tensor x = leaf(r).requires_grad_();
  comm::Pending ring = [&] {
    const CollectiveScope scope("ring");
    return mesh.sp().exchange(leaf(r), (r + 1) % 4, {4, 2}, (r + 3) % 4);
  }();
  const CollectiveScope scope("block");
  results.swapped = swap(x, pair).detach();
  results.total = recompute ? Recomputed::apply(x, address_of(pair), address_of(row))
                            : Recomputed::compute(x, pair, row);
  const Tensor loss = (results.total * (r + 1)).sum();
  torch::autograd::backward({loss});
  results.received = ring.wait();
  results.gradient = x.grad().clone();
  results.shard = mesh.sp().reduce_scatter(x.grad().contiguous(), {1, 1, 1, 1}).wait();
  results.total = results.total.detach();
  return results;
}

// The same from all ranks' leaves, without communication.
Results expected_results(int r) {
  const auto swapped = [](int rank) {
    const int first = rank / 2 * 2;
    return at::cat(
        {leaf(first).narrow(0, rank % 2 * 2, 2), leaf(first + 1).narrow(0, rank % 2 * 2, 2)});
  };
  const auto gradient = [&](int rank) {
    // d(loss)/d(swapped) = 2 * swapped * the sum of its row's weights; back through the swap.
    const auto at_swapped = [&](int other) {
      return swapped(other) * 2 * ((other % 2 + 1) + (other % 2 + 3));
    };
    const int first = rank / 2 * 2;
    return at::cat({at_swapped(first).narrow(0, rank % 2 * 2, 2),
                    at_swapped(first + 1).narrow(0, rank % 2 * 2, 2)});
  };
  Results results;
  results.swapped = swapped(r);
  const Tensor a = swapped(r % 2), b = swapped(r % 2 + 2);
  results.total = a * a + b * b;
  results.received = leaf((r + 3) % 4);
  results.gradient = gradient(r);
  results.shard = at::zeros({1, 2});
  for (int other = 0; other < 4; ++other) results.shard += gradient(other).narrow(0, r, 1);
  return results;
}

void expect_results(const Results& got, const Results& want) {
  expect_same(got.swapped, want.swapped, "swapped");
  expect_same(got.total, want.total, "total");
  expect_same(got.received, want.received, "received");
  expect_same(got.gradient, want.gradient, "gradient");
  expect_same(got.shard, want.shard, "shard");
}

void run_mixed(World& world, bool recompute) {
  world.run([&](RankContext& rank) {
    expect_results(mixed_program(rank, recompute), expected_results(rank.rank()));
  });
}

}  // namespace

TEST_CASE("a thousand schedules give the same bytes", "[world]") {
  Watchdog watchdog;
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    WorldOptions options;
    options.schedule_seed = seed;
    options.cores = 1 + static_cast<int>(seed % 4);
    World world(4, options);
    INFO("schedule seed " << seed);
    run_mixed(world, seed % 2 == 1);
  }
}

TEST_CASE("results do not depend on the delivery checks or on the number of cores", "[world]") {
  for (const bool checks : {true, false}) {
    for (const int cores : {0, 1, 2, 7}) {
      Watchdog watchdog;
      WorldOptions options;
      options.delivery_checks = checks;
      options.cores = cores;
      World world(4, options);
      for (const bool recompute : {false, true}) run_mixed(world, recompute);
    }
  }
}

TEST_CASE("the calls of a backward carry the forward's tags, marked", "[world]") {
  Watchdog watchdog;
  World world(4);
  run_mixed(world, true);
  for (int r = 0; r < 4; ++r) {
    std::vector<std::string> tags;
    for (const CollectiveCall& call : world.calls(r)) tags.push_back(call.group + " " + call.tag);
    CHECK(tags == std::vector<std::string>{
                      "sp ring", "sp ring", "ulysses block", "ulysses block/inner",
                      "ring block/inner", "ulysses recomputed/inner~", "ring recomputed/inner~",
                      "ring recomputed/inner'", "ulysses recomputed/inner'", "sp block"});
  }
}

TEST_CASE("backward passes that communicate nest without deadlock", "[world]") {
  // Each level's backward recomputes the level below and runs its backward, all with collectives.
  struct Level : torch::autograd::Function<Level> {
    static Tensor compute(const Tensor& x, int64_t group, int64_t depth) {
      return depth == 0 ? sum(x * x, group_at(group)) : Level::apply(x, group, depth);
    }
    static Tensor forward(AutogradContext* context, const Tensor& x, int64_t group, int64_t depth) {
      context->save_for_backward({x});
      context->saved_data["group"] = group;
      context->saved_data["depth"] = depth;
      return compute(x, group, depth - 1);
    }
    static variable_list backward(AutogradContext* context, variable_list grads) {
      const at::AutoGradMode with_graph(true);
      const Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
      const Tensor y = compute(x, context->saved_data["group"].toInt(),
                               context->saved_data["depth"].toInt() - 1);
      return {torch::autograd::grad({y}, {x}, {grads[0]})[0], Tensor(), Tensor()};
    }
  };
  for (const uint64_t seed : {0, 1, 2}) {
    Watchdog watchdog;
    WorldOptions options;
    options.schedule_seed = seed;
    World world(3, options);
    world.run([](RankContext& rank) {
      const Communicator group = whole_world(rank);
      const Tensor x = at::full({4}, rank.rank() + 1.0).requires_grad_();
      const std::thread::id thread = std::this_thread::get_id();
      x.register_hook([&](const Tensor& grad) {
        expect(std::this_thread::get_id() == thread, "the backward on the rank's own thread");
        return grad;
      });
      const Tensor y = Level::compute(x, address_of(group), 8);
      torch::autograd::backward({y.sum()});
      expect_same(y.detach(), at::full({4}, 14.0), "1 + 4 + 9");
      expect_same(x.grad(), at::full({4}, 3 * 2 * (rank.rank() + 1.0)), "2x for each rank's loss");
    });
  }
}

TEST_CASE("64 ranks", "[world]") {
  Watchdog watchdog;
  World world(64);
  world.run([](RankContext& rank) {
    const Communicator all = whole_world(rank);
    const Tensor total = all.all_reduce(at::full({3}, rank.rank(), at::kLong)).wait();
    expect_same(total, at::full({3}, 63 * 32, at::kLong), "the sum of all ranks");
    const comm::Mesh mesh(rank, {4, 4, 4});
    const std::vector<int64_t> rows(4, 1);
    for (const Communicator* group : {&mesh.dp(), &mesh.ring(), &mesh.ulysses()}) {
      const Tensor ranks = group->all_gather(at::full({1}, rank.rank(), at::kLong), rows).wait();
      for (int64_t i = 0; i < 4; ++i) {
        expect(ranks[i].item<int64_t>() == group->world_ranks()[static_cast<size_t>(i)],
               "the group's members");
      }
    }
  });
}

TEST_CASE("a world of one rank", "[world]") {
  Watchdog watchdog;
  World world(1);
  world.run([](RankContext& rank) {
    const comm::Mesh mesh(rank, {});
    expect_same(mesh.sp().all_gather(leaf(0), {4}).wait(), leaf(0), "its own rows");
  });
  CHECK(world.calls(0).empty());
}

TEST_CASE("whatever a rank throws ends the run with its message and category", "[world]") {
  const auto error_of = [](World& world, const std::function<void()>& fail) {
    Watchdog watchdog;
    const CollectiveError error = violation_of([&] {
      world.run([&](RankContext& rank) {
        const Communicator group = whole_world(rank);
        group.barrier();
        if (rank.rank() == 2) fail();
        group.barrier();  // the others wait here
      });
    });
    require_violation(error, ViolationKind::kRankFailed);
    run_mixed(world, true);  // the world can be used again
    return error;
  };
  World world(4);
  SECTION("an error of ours") {
    const auto error = error_of(world, [] { throw_error(ErrorKind::kMissing, "no device"); });
    CHECK(error.kind() == ErrorKind::kMissing);
    require_text(error, {"rank 2 failed: no device\n"});
  }
  SECTION("an error of LibTorch, without its backtrace") {
    const auto error = error_of(world, [] { TORCH_CHECK(false, "bad shapes"); });
    CHECK(error.kind() == ErrorKind::kInternal);
    require_text(error, {"rank 2 failed: bad shapes"});
    CHECK(!contains(error.what(), "frame #"));
  }
  SECTION("an error of LibTorch inside a backward") {
    const auto error = error_of(world, [] {
      const Tensor x = at::ones({2}).requires_grad_();
      x.register_hook([](const Tensor& grad) -> Tensor {
        TORCH_CHECK(false, "bad gradient");
        return grad;
      });
      torch::autograd::backward({x.sum()});
    });
    require_text(error, {"rank 2 failed: bad gradient"});
  }
  SECTION("a standard exception") {
    const auto error = error_of(world, [] { throw std::out_of_range("too far"); });
    CHECK(error.kind() == ErrorKind::kInternal);
    require_text(error, {"rank 2 failed: too far\n"});
  }
  SECTION("something else") {
    const auto error = error_of(world, [] { throw 42; });
    CHECK(error.kind() == ErrorKind::kInternal);
    require_text(error, {"rank 2 failed"});
  }
}

TEST_CASE("a world is used again after each kind of failure", "[world]") {
  World world(4);
  const auto fail_and_go_on = [&](ViolationKind kind,
                                  const std::function<void(RankContext&)>& program) {
    Watchdog watchdog;
    require_violation(violation_of([&] { world.run(program); }), kind);
    run_mixed(world, false);
  };
  fail_and_go_on(ViolationKind::kMismatch, [](RankContext& rank) {
    const CollectiveScope scope(rank.rank() == 3 ? "c" : "d");
    whole_world(rank).barrier();
  });
  fail_and_go_on(ViolationKind::kDeadlock, [](RankContext& rank) {
    if (rank.rank() != 1) whole_world(rank).barrier();
  });
  fail_and_go_on(ViolationKind::kUnwaited,
                 [](RankContext& rank) { (void)whole_world(rank).all_reduce(at::ones({2})); });
  fail_and_go_on(ViolationKind::kRace, [](RankContext& rank) {
    const Tensor x = at::ones({4});
    comm::Pending pending = whole_world(rank).all_gather(x, {4, 4, 4, 4});
    x.add_(1);
    pending.wait();
  });
  fail_and_go_on(ViolationKind::kOrder, [](RankContext& rank) {
    const Communicator a = whole_world(rank, "a"), b = whole_world(rank, "b");
    const bool first = rank.rank() == 0;
    comm::Pending one = (first ? a : b).all_reduce(at::ones({2}));
    comm::Pending two = (first ? b : a).all_reduce(at::ones({2}));
    one.wait();
    two.wait();
  });
}

TEST_CASE("two worlds live side by side", "[world]") {
  SECTION("in turn") {
    Watchdog watchdog;
    World first(4), second(4);
    for (int round = 0; round < 3; ++round) {
      run_mixed(first, round % 2 == 0);
      run_mixed(second, round % 2 == 1);
    }
  }
  SECTION("at the same time") {
    Watchdog watchdog;
    std::atomic<int> right{0};
    const auto use = [&](uint64_t seed) {
      WorldOptions options;
      options.schedule_seed = seed;
      World world(4, options);
      for (int round = 0; round < 20; ++round) run_mixed(world, round % 2 == 0);
      ++right;
    };
    std::thread one(use, 1), two(use, 2);
    one.join();
    two.join();
    CHECK(right == 2);
  }
}

TEST_CASE("a rank keeps its thread, with one intra-op thread", "[world]") {
  Watchdog watchdog;
  World world(3);
  std::vector<std::thread::id> threads(3);
  const int threads_here = at::get_num_threads();
  for (int round = 0; round < 3; ++round) {
    world.run([&](RankContext& rank) {
      auto& thread = threads[static_cast<size_t>(rank.rank())];
      expect(round == 0 || thread == std::this_thread::get_id(), "the thread of the last run");
      thread = std::this_thread::get_id();
      expect(at::get_num_threads() == 1, "one intra-op thread");
      expect(!c10::AutogradState::get_tls_state().get_multithreading_enabled(),
             "backward passes stay on this thread");
      expect(comm::current_tag().empty(), "no tag of another run");
    });
  }
  CHECK(std::set<std::thread::id>(threads.begin(), threads.end()).size() == 3);
  CHECK(at::get_num_threads() == threads_here);
}

namespace {

// `body` on a thread of its own a rank.
void on_threads(int ranks, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) threads.emplace_back(body, r);
  for (std::thread& thread : threads) thread.join();
}

// What adopt() throws; "" if it returns.
std::string adopt_error(World& world, int rank, const std::function<void(RankContext&)>& fn) {
  try {
    world.adopt(rank, fn);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("threads that others made become ranks, run after run", "[world]") {
  Watchdog watchdog;
  World world(4);
  std::atomic<int> right{0};
  on_threads(4, [&](int r) {
    // A thread's first question is answered with, and sets, what any thread of the process set
    // last.
    at::get_num_threads();
    at::set_num_threads(2);
    for (int round = 0; round < 50; ++round) {
      const std::string error = adopt_error(world, r, [&](RankContext& rank) {
        expect(rank.rank() == r, "its rank");
        expect(at::get_num_threads() == 1, "one intra-op thread");
        expect_results(mixed_program(rank, round % 2 == 1), expected_results(r));
      });
      right += error.empty() && at::get_num_threads() == 2 &&
               c10::AutogradState::get_tls_state().get_multithreading_enabled();
    }
  });
  CHECK(right == 200);
  run_mixed(world, false);  // and threads of its own afterwards
}

TEST_CASE("every adopted thread hears of a failure, and the next run is sound", "[world]") {
  Watchdog watchdog;
  World world(3);
  std::vector<std::string> thrown(3), mismatched(3), next(3);
  on_threads(3, [&](int r) {
    const auto at = static_cast<size_t>(r);
    thrown[at] = adopt_error(world, r, [](RankContext& rank) {
      const Communicator group = whole_world(rank);
      if (rank.rank() == 1) throw std::out_of_range("too far");
      group.barrier();
    });
    mismatched[at] = adopt_error(world, r, [](RankContext& rank) {
      const CollectiveScope scope(rank.rank() == 2 ? "c" : "d");
      whole_world(rank).barrier();
    });
    next[at] = adopt_error(world, r, [](RankContext& rank) { whole_world(rank).barrier(); });
  });
  for (size_t r = 0; r < 3; ++r) {
    CHECK(contains(thrown[r], "rank 1 failed: too far"));
    CHECK(contains(mismatched[r], "mismatch"));
    CHECK(next[r].empty());
  }
}

TEST_CASE("a rank joins an adopted run once, and only if it exists", "[world]") {
  Watchdog watchdog;
  World world(2);
  const auto nothing = [](RankContext&) {};
  CHECK(contains(adopt_error(world, 2, nothing), "rank 2 is not in a world of 2 ranks"));
  CHECK(contains(adopt_error(world, -1, nothing), "rank -1 is not in a world of 2 ranks"));
  on_threads(2, [&](int r) {
    world.adopt(r, [&](RankContext& rank) {
      if (rank.rank() == 0) {
        expect(contains(adopt_error(world, 0, nothing), "rank 0 is already in this run"), "once");
        const std::string error = error_text([&] { world.run(nothing); });
        expect(contains(error, "adopted run have not all returned"), "no run inside a run");
      }
      whole_world(rank).barrier();
    });
  });
  world.run([&](RankContext& rank) {
    if (rank.rank() == 0) {
      expect(contains(adopt_error(world, 0, nothing), "World::run has not returned"), "not both");
    }
  });
}

TEST_CASE("the calls are those of the last run", "[world]") {
  Watchdog watchdog;
  World world(2);
  for (int round = 0; round < 2; ++round) {
    world.run([](RankContext& rank) {
      const Communicator group = whole_world(rank, "g");
      group.barrier();
      group.all_reduce(at::ones({3}), comm::Reduce::kMax).wait();
      group.exchange(at::ones({2}), 1 - rank.rank(), {2}, 1 - rank.rank()).wait();
    });
    for (const int r : {0, 1}) {
      std::string text;
      for (const CollectiveCall& call : world.calls(r)) {
        text += fmt::format("{} {}; ", call.number, call.describe());
      }
      CHECK(text == fmt::format("0 barrier; 1 all_reduce Float send=[3] receive=[3] op=max; "
                                "0 send Float send=[2] peer={}; 0 recv Float receive=[2] peer={}; ",
                                1 - r, 1 - r));
    }
  }
}

TEST_CASE("a world that cannot be", "[world]") {
  CHECK(contains(error_text([] { World(0); }), "at least one rank"));
  CHECK(contains(error_text([] { World(-3); }), "got -3"));
}

}  // namespace shardproof::sim
