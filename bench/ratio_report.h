// The usual console output, and below it the table that the program exists for.
#pragma once
#include <benchmark/benchmark.h>

#include <map>
#include <string>
#include <vector>

namespace shardproof::bench {

class RatioReport : public benchmark::ConsoleReporter {
 public:
  RatioReport() : ConsoleReporter(OO_Tabular) {}
  void ReportRuns(const std::vector<Run>& runs) override;
  void Finalize() override;
  bool failed() const { return failed_; }

 private:
  struct Row {
    double sim_ms = 0;
    double whole_ms = 0;
    double ratio = 0, least = 0, most = 0;
    double cpu_ratio = 0;
  };
  std::vector<std::string> names_;  // in the order in which they ran
  std::map<std::string, Row> rows_;
  bool failed_ = false;
};

}  // namespace shardproof::bench
