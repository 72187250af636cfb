// The options of bench_sim_overhead; what it does not know goes to Google Benchmark.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace shardproof::bench {

struct Options {
  std::string device = "cpu";  // cpu or cuda
  std::string dtype;           // fp64, fp32, bf16, fp16; default fp32 on a CPU, bf16 on CUDA
  std::string backend;         // of local attention; default auto on a CPU, cudnn on CUDA
  std::vector<int64_t> shape;  // S, H, D of the main comparison
  std::vector<int> sp = {1, 2, 4, 8};
  std::vector<std::string> modes = {"ulysses", "ring", "hybrid"};
  std::vector<int> cores;         // CPU only; default 1 and all
  bool main_only = false;         // no scaling series, no micro benchmarks
  bool help = false;              // was asked for, and printed
  std::vector<std::string> rest;  // for Google Benchmark, with our defaults in front

  bool cuda() const { return device == "cuda"; }
};

// Errors (kBadInput): words that cannot be read.
Options parse_options(int argc, char** argv);

}  // namespace shardproof::bench
