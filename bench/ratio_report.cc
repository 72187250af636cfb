#include "bench/ratio_report.h"

#include <fmt/format.h>

#include <algorithm>

namespace shardproof::bench {
namespace {

// Google Benchmark 1.8 has renamed the field.
template <class Run>
bool has_failed(const Run& run) {
  if constexpr (requires { run.error_occurred; }) {
    return run.error_occurred;
  } else {
    return static_cast<int>(run.skipped) != 0;
  }
}

}  // namespace

void RatioReport::ReportRuns(const std::vector<Run>& runs) {
  ConsoleReporter::ReportRuns(runs);
  for (const Run& run : runs) {
    failed_ = failed_ || has_failed(run);
    const auto ratio = run.counters.find("ratio");
    if (ratio == run.counters.end()) continue;
    const std::string& name = run.run_name.function_name;
    if (!rows_.contains(name)) names_.push_back(name);
    Row& row = rows_[name];
    const double value = ratio->second;
    if (run.aggregate_name == "min") row.least = value;
    if (run.aggregate_name == "max") row.most = value;
    if (run.aggregate_name != "median") continue;
    row.ratio = value;
    row.sim_ms = run.GetAdjustedRealTime();
    row.whole_ms = run.counters.at("whole_ms");
    row.cpu_ratio = run.counters.at("cpu_ratio");
  }
}

void RatioReport::Finalize() {
  ConsoleReporter::Finalize();
  if (names_.empty()) return;
  GetOutputStream() << fmt::format(
      "\nTime with virtual ranks / time without, same work and same cores (medians of pairs)\n"
      "{:<52} {:>10} {:>10} {:>6}  {:<13} {:>9}\n",
      "", "whole ms", "sim ms", "ratio", "[least, most]", "CPU ratio");
  for (const std::string& name : names_) {
    const Row& row = rows_.at(name);
    GetOutputStream() << fmt::format(
        "{:<52} {:>10.2f} {:>10.2f} {:>6.3f}  {:<13} {:>9.3f}\n", name, row.whole_ms, row.sim_ms,
        row.ratio, fmt::format("[{:.2f}, {:.2f}]", row.least, row.most), row.cpu_ratio);
  }
}

}  // namespace shardproof::bench
