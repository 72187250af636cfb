// The simulator against a real transport: the same program on both, rank by rank.
#pragma once
#include <string>
#include <vector>

#include "verify/rank_world.h"

namespace shardproof::verify {

// Runs every program on the real ranks and, where results are judged, on virtual ranks too. What
// the real ones did is passed on; where the two differ is a finding: "trace" for the sequence of
// collectives of each rank (kinds, groups, tags, sizes), "bitwise" for what they computed. With two
// ranks sums have one order, and the bits must be the same, deterministic kernels provided; with
// more, results may differ by rounding.
class ComparedWorld final : public RankWorld {
 public:
  // Both must have the same number of ranks and outlive the object.
  ComparedWorld(RankWorld& real, RankWorld& simulated) : real_(real), simulated_(simulated) {}
  int size() const override { return real_.size(); }
  bool judges() const override { return real_.judges(); }
  void plant(const sim::FaultPlan& faults) override { real_.plant(faults); }
  void run(const RankProgram& program, std::vector<RankResult>& results) override;
  const std::vector<CollectiveCall>& calls(int rank) const override { return real_.calls(rank); }
  std::vector<CheckResult> findings() const override { return findings_; }

 private:
  RankWorld& real_;
  RankWorld& simulated_;
  std::vector<CheckResult> findings_;
};

class ComparedWorlds final : public Worlds {
 public:
  ComparedWorlds(Worlds& real, Worlds& simulated) : real_(real), simulated_(simulated) {}
  RankWorld& get(int ranks) override;
  at::Device device() const override { return real_.device(); }

 private:
  Worlds& real_;
  Worlds& simulated_;
  std::map<int, std::unique_ptr<ComparedWorld>> worlds_;
};

// The first difference between two traces of a rank; empty if there is none.
std::string trace_difference(const std::vector<CollectiveCall>& real,
                             const std::vector<CollectiveCall>& simulated);
// The first tensor that differs by more than `limit` (relative L2; 0: in any bit); empty if none.
std::string result_difference(const RankResult& real, const RankResult& simulated, bool exact);

}  // namespace shardproof::verify
