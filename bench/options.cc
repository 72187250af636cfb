#include "bench/options.h"

#include <CLI/CLI.hpp>
#include <thread>

#include "bench/command_line.h"

namespace shardproof::bench {
namespace {

void fill_defaults(Options& o) {
  if (o.dtype.empty()) o.dtype = o.cuda() ? "bf16" : "fp32";
  if (o.backend.empty()) o.backend = o.cuda() ? "cudnn" : "auto";
  if (o.shape.empty()) {
    o.shape = o.cuda() ? std::vector<int64_t>{16640, 24, 128} : std::vector<int64_t>{4096, 8, 64};
  }
  if (o.cores.empty()) {
    o.cores = {1};
    const int all = static_cast<int>(std::thread::hardware_concurrency());
    if (!o.cuda() && all > 1) o.cores.push_back(all);
  }
}

}  // namespace

Options parse_options(int argc, char** argv) {
  Options o;
  std::string json;
  CLI::App app{
      "Measures what simulating sequence-parallel ranks costs: the same attention, forward and "
      "backward, without and with virtual ranks, alternately in one process."};
  app.add_option("--device", o.device, "cpu or cuda")->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--dtype", o.dtype, "fp64, fp32, bf16 or fp16 (default: fp32, on CUDA bf16)")
      ->check(CLI::IsMember({"fp64", "fp32", "bf16", "fp16"}));
  app.add_option("--backend", o.backend, "Local attention (default: auto, on CUDA cudnn)");
  app.add_option("--shape", o.shape, "S,H,D (default: 4096,8,64, on CUDA 16640,24,128)")
      ->delimiter(',')
      ->expected(3)
      ->check(CLI::PositiveNumber);
  app.add_option("--sp", o.sp, "Sequence-parallel sizes")
      ->delimiter(',')
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app.add_option("--modes", o.modes, "ulysses, ring, allgather, hybrid, hybrid_allgather")
      ->delimiter(',')
      ->check(CLI::IsMember({"ulysses", "ring", "allgather", "hybrid", "hybrid_allgather"}))
      ->capture_default_str();
  app.add_option("--cores", o.cores, "Cores given to both sides (default: 1 and all; CPU only)")
      ->delimiter(',')
      ->check(CLI::Range(1, 1024));
  app.add_flag("--main-only", o.main_only, "No scaling series and no micro benchmarks");
  app.add_option("--json", json, "Short for --benchmark_out=FILE --benchmark_out_format=json");
  app.footer("All other options go to Google Benchmark (--benchmark_filter=..., ...).");
  app.allow_extras();
  o.help = !parse_command_line(app, argc, argv);
  if (o.help) return o;
  fill_defaults(o);
  // What is typed comes last and wins.
  o.rest = {"--benchmark_repetitions=9", "--benchmark_report_aggregates_only=true",
            "--benchmark_counters_tabular=true"};
  if (!json.empty()) {
    o.rest.push_back("--benchmark_out=" + json);
    o.rest.emplace_back("--benchmark_out_format=json");
  }
  for (const std::string& word : app.remaining()) o.rest.push_back(word);
  return o;
}

}  // namespace shardproof::bench
