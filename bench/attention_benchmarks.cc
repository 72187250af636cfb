#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>

#include <algorithm>

#include "base/error.h"
#include "bench/attention_pair.h"
#include "bench/benchmarks.h"

namespace shardproof::bench {
namespace {

at::ScalarType scalar_type(const std::string& dtype) {
  if (dtype == "fp64") return at::kDouble;
  if (dtype == "fp32") return at::kFloat;
  if (dtype == "bf16") return at::kBFloat16;
  if (dtype == "fp16") return at::kHalf;
  bad_input("dtype '{}'; expected fp64, fp32, bf16 or fp16", dtype);
}

// Keeps the pair of the benchmark that runs, so that repetitions do not pay for its warm-up (on
// CUDA each rank's thread makes its own cuDNN plans), and no other, for the memory.
class PairShelf {
 public:
  explicit PairShelf(const Options& options) : options_(options) {}

  std::shared_ptr<const AttentionWork> work(const Shape& shape) {
    if (!work_ || work_->shape != shape) {
      clear();
      work_ = std::make_shared<AttentionWork>(
          shape, scalar_type(options_.dtype),
          options_.cuda() ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU), options_.backend);
    }
    return work_;
  }

  AttentionPair& pair(const std::string& name, const Shape& shape, const SimSetup& setup) {
    const auto inputs = work(shape);
    if (name != name_) {
      pair_.reset();
      name_.clear();
      pair_ = std::make_unique<AttentionPair>(inputs, setup);
      name_ = name;
    }
    return *pair_;
  }

 private:
  void clear() {
    pair_.reset();
    work_.reset();
    name_.clear();
  }

  Options options_;
  std::string name_;
  std::shared_ptr<const AttentionWork> work_;
  std::unique_ptr<AttentionPair> pair_;
};

void run_whole(benchmark::State& state, const AttentionWork& work, int cores) {
  at::set_num_threads(cores);
  work.run();
  synchronize(work.q.device());
  for (auto _ : state) {
    work.run();
    synchronize(work.q.device());
  }
}

// Each iteration runs both sides one after the other, so that drift of the machine cancels in the
// ratio; which comes first alternates. The benchmark's own time is the simulated side's.
void run_pair(benchmark::State& state, AttentionPair& pair, bool& whole_first) {
  Seconds whole, sim;
  for (auto _ : state) {
    if (whole_first) whole = pair.time_whole();
    sim = pair.time_sim();
    if (!whole_first) whole = pair.time_whole();
    whole_first = !whole_first;
    state.SetIterationTime(sim.wall);
  }
  state.counters["whole_ms"] = 1e3 * whole.wall;
  state.counters["whole_cpu_ms"] = 1e3 * whole.cpu;
  state.counters["sim_cpu_ms"] = 1e3 * sim.cpu;
  state.counters["ratio"] = sim.wall / whole.wall;
  state.counters["cpu_ratio"] = sim.cpu / whole.cpu;
}

double smallest(const std::vector<double>& values) {
  return *std::min_element(values.begin(), values.end());
}
double largest(const std::vector<double>& values) {
  return *std::max_element(values.begin(), values.end());
}

// What a benchmark throws becomes its result: the others still run.
template <class Function>
benchmark::internal::Benchmark* add(const std::string& name, const Function& function) {
  return benchmark::RegisterBenchmark(name.c_str(), [function](benchmark::State& state) {
    try {
      function(state);
    } catch (const std::exception& error) {
      state.SkipWithError(error.what());
    }
  });
}

void add_pair(const std::shared_ptr<PairShelf>& shelf, const std::string& name, const Shape& shape,
              const SimSetup& setup) {
  const auto whole_first = std::make_shared<bool>(true);
  add(name,
      [=](benchmark::State& state) {
        run_pair(state, shelf->pair(name, shape, setup), *whole_first);
      })
      ->Iterations(1)
      ->UseManualTime()
      ->ComputeStatistics("min", smallest)
      ->ComputeStatistics("max", largest)
      ->Unit(benchmark::kMillisecond);
}

std::string sim_name(const std::string& series, const SimSetup& setup) {
  return fmt::format("{}/{}/sp:{}/checks:{}/cores:{}", series, setup.mode, setup.sp,
                     setup.checks ? 1 : 0, setup.cores);
}

// Fewer ranks than cores would leave cores idle on one side only.
bool is_fair(const SimSetup& setup) { return setup.sp >= setup.cores; }

void register_main(const Options& o, const std::shared_ptr<PairShelf>& shelf) {
  const Shape shape{o.shape[0], o.shape[1], o.shape[2]};
  for (const int cores : o.cores) {
    add(fmt::format("attention_whole/cores:{}", cores),
        [=](benchmark::State& state) { run_whole(state, *shelf->work(shape), cores); })
        ->UseRealTime()
        ->MeasureProcessCPUTime()
        ->Unit(benchmark::kMillisecond);
    for (const int sp : o.sp) {
      const auto modes = sp == 1 ? std::vector<std::string>{"local"} : o.modes;
      for (const std::string& mode : modes) {
        if (mode.starts_with("hybrid") && (sp < 4 || sp % 2 != 0)) continue;
        for (const bool checks : {false, true}) {
          const SimSetup setup{mode, sp, checks, cores};
          if (is_fair(setup)) add_pair(shelf, sim_name("attention_sim", setup), shape, setup);
        }
      }
    }
  }
}

// Fixed total work, more and more ranks.
void register_ranks(const Options& o, const std::shared_ptr<PairShelf>& shelf) {
  const Shape shape{1024, 64, 16};
  for (const int cores : o.cores) {
    for (int sp = 1; sp <= 64; sp *= 2) {
      const SimSetup setup{"ulysses", sp, true, cores};
      if (is_fair(setup)) add_pair(shelf, sim_name("attention_ranks", setup), shape, setup);
    }
  }
}

// Four ranks, more and more tokens.
void register_tokens(const Options& o, const std::shared_ptr<PairShelf>& shelf) {
  for (const std::string& mode : o.modes) {
    for (int64_t tokens = 256; tokens <= 8192; tokens *= 2) {
      const Shape shape{tokens, o.shape[1], o.shape[2]};
      const SimSetup setup{mode, 4, true, 1};
      add_pair(shelf, fmt::format("attention_tokens/{}/S:{}/sp:4/checks:1/cores:1", mode, tokens),
               shape, setup);
    }
  }
}

}  // namespace

void register_attention(const Options& options) {
  const auto shelf = std::make_shared<PairShelf>(options);
  register_main(options, shelf);
  if (options.main_only) return;
  register_ranks(options, shelf);
  register_tokens(options, shelf);
}

}  // namespace shardproof::bench
