// What does it cost to run sequence-parallel attention on virtual ranks instead of running the same
// attention without them? See --help, and reports/published for measured answers.
#include <benchmark/benchmark.h>
#include <torch/version.h>

#include "base/error.h"
#include "base/run_main.h"
#include "bench/benchmarks.h"
#include "bench/ratio_report.h"
#include "comm/device.h"

namespace {

using namespace shardproof;

bool initialize_library(const char* program, bench::Options& options) {
  std::vector<char*> words = {const_cast<char*>(program)};
  for (std::string& word : options.rest) words.push_back(word.data());
  int count = static_cast<int>(words.size());
  words.push_back(nullptr);
  benchmark::Initialize(&count, words.data());
  return !benchmark::ReportUnrecognizedArguments(count, words.data());
}

void describe(const bench::Options& o) {
  benchmark::AddCustomContext("device", o.device);
  benchmark::AddCustomContext("dtype", o.dtype);
  benchmark::AddCustomContext("backend", o.backend);
  benchmark::AddCustomContext("shape",
                              fmt::format("S={} H={} D={}", o.shape[0], o.shape[1], o.shape[2]));
  benchmark::AddCustomContext("torch", TORCH_VERSION);
}

int run(int argc, char** argv) {
  bench::Options options = bench::parse_options(argc, argv);
  if (options.help) return 0;
  if (!initialize_library(argv[0], options)) return static_cast<int>(ErrorKind::kBadInput);
  comm::compute_device(options.device);
  describe(options);
  bench::register_attention(options);
  bench::register_micro(options);
  bench::RatioReport report;
  benchmark::RunSpecifiedBenchmarks(&report);
  return report.failed() ? static_cast<int>(ErrorKind::kInternal) : 0;
}

}  // namespace

int main(int argc, char** argv) {
  shardproof::run_main("bench_sim_overhead", [=] { return run(argc, argv); });
}
