#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>

#include "base/error.h"
#include "bench/benchmarks.h"
#include "comm/mesh.h"
#include "sim/world.h"
#include "verify/attention/attention_check.h"
#include "verify/models/model_run.h"

namespace shardproof::bench {
namespace {

sim::WorldOptions world_options(bool checks, int cores) {
  sim::WorldOptions options;
  options.cores = cores;
  options.delivery_checks = checks;
  return options;
}

// One element to and from every rank: what remains is posting, matching and waking.
void hand_over(benchmark::State& state, int ranks, int cores) {
  constexpr int kCalls = 50;
  sim::World world(ranks, world_options(/*checks=*/true, cores));
  const auto program = [&](sim::RankContext& rank) {
    const comm::Mesh mesh(rank, {.ulysses = ranks});
    const std::vector<int64_t> one(static_cast<size_t>(ranks), 1);
    for (int i = 0; i < kCalls; ++i) {
      benchmark::DoNotOptimize(mesh.ulysses().all_to_all(at::ones({ranks}), one, one).wait());
    }
  };
  world.run(program);
  for (auto _ : state) world.run(program);
  using benchmark::Counter;
  const auto per = [](double n) {
    return Counter(n, Counter::kIsIterationInvariantRate | Counter::kInvert);
  };
  state.counters["s_per_collective"] = per(kCalls);
  state.counters["s_per_rank_call"] = per(kCalls * ranks);
}

void make_world(benchmark::State& state, int ranks) {
  for (auto _ : state) {
    sim::World world(ranks, world_options(/*checks=*/true, 1));
    benchmark::DoNotOptimize(world.size());
  }
}

void run_nothing(benchmark::State& state, int ranks) {
  sim::World world(ranks, world_options(/*checks=*/true, 1));
  for (auto _ : state) world.run([](sim::RankContext&) {});
}

void verify_case(benchmark::State& state, const std::string& id) {
  at::set_num_threads(1);  // as in the suite, where several cases run at once
  const auto c = verify::AttentionCase::parse(id);
  verify::WorldPool worlds(world_options(/*checks=*/true, 1));
  for (auto _ : state) {
    const verify::CaseResult result = verify::check_attention(c, {}, worlds);
    if (result.status != verify::Status::kPass) state.SkipWithError(result.reason.c_str());
  }
}

// One world from nothing: threads, groups, forward and backward of a whole model on every rank.
void model_world(benchmark::State& state, const std::string& id, int cores) {
  at::set_num_threads(1);
  const auto c = verify::ModelCase::parse(id);
  const verify::ModelData data = verify::draw_model_data(c);
  for (auto _ : state) {
    sim::World world(c.mesh.world(), world_options(/*checks=*/true, cores));
    verify::SimRankWorld ranks(world);
    const verify::ModelRun run = verify::run_parallel_model(c, data, {}, ranks);
    if (!run.completed) state.SkipWithError("the run was ended");
  }
}

template <class Function>
void add(const std::string& name, const Function& function) {
  benchmark::RegisterBenchmark(name.c_str(), function)
      ->UseRealTime()
      ->MeasureProcessCPUTime()
      ->Unit(benchmark::kMicrosecond);
}

}  // namespace

void register_micro(const Options& options) {
  if (options.main_only || options.cuda()) return;  // they measure the simulator, not the device
  for (const int cores : options.cores) {
    for (int ranks = 2; ranks <= 64; ranks *= 2) {
      add(fmt::format("hand_over/ranks:{}/cores:{}", ranks, cores),
          [=](benchmark::State& state) { hand_over(state, ranks, cores); });
    }
  }
  for (const int ranks : {4, 64}) {
    add(fmt::format("make_world/ranks:{}", ranks),
        [=](benchmark::State& state) { make_world(state, ranks); });
    add(fmt::format("run_nothing/ranks:{}", ranks),
        [=](benchmark::State& state) { run_nothing(state, ranks); });
  }
  for (const int cores : options.cores) {
    for (const char* split :
         {"ulysses2/fp32/ragged", "ulysses4/fp32/ragged", "ulysses8/fp32/ragged.headpad"}) {
      add(fmt::format("model_world/qwenimage/{}/cores:{}", split, cores),
          [=, id = std::string("models/qwenimage/ulysses/") + split](benchmark::State& state) {
            model_world(state, id, cores);
          });
    }
  }
  for (const char* id :
       {"attention/self/ulysses/dp1.ring1.ulysses2/fp32/b2.i16.h4.d16#1",
        "attention/joint/hybrid/dp1.ring2.ulysses2/bf16/b2.t8.i24.h4.d16.ragged#1"}) {
    add(fmt::format("verify_case/{}", id),
        [id = std::string(id)](benchmark::State& state) { verify_case(state, id); });
  }
}

}  // namespace shardproof::bench
