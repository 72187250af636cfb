// Cases on real ranks: this process is one of them, rank 0 judges.
#pragma once
#include "comm/process_world.h"
#include "verify/rank_world.h"

namespace shardproof::verify {

class ProcessRankWorld final : public RankWorld {
 public:
  explicit ProcessRankWorld(comm::ProcessWorld& world) : world_(world) {}
  int size() const override { return world_.world_size(); }
  bool judges() const override { return world_.rank() == 0; }
  void plant(const sim::FaultPlan& faults) override;
  // Collective. If this rank's program throws, all others are told and end; the error names the
  // collective that was the rank's last.
  void run(const RankProgram& program, std::vector<RankResult>& results) override;
  const std::vector<CollectiveCall>& calls(int rank) const override;

 private:
  comm::ProcessWorld& world_;
  std::vector<std::vector<CollectiveCall>> calls_;
};

class ProcessWorlds final : public Worlds {
 public:
  explicit ProcessWorlds(comm::ProcessWorld& world) : world_(world), ranks_(world) {}
  // Errors (kBadInput): a case of another number of ranks.
  RankWorld& get(int ranks) override;
  at::Device device() const override { return world_.device(); }

 private:
  comm::ProcessWorld& world_;
  ProcessRankWorld ranks_;
};

// A rank's tensors and calls as bytes, and back. Errors (kInternal): bytes that end too early.
std::string pack(const RankResult& result, const std::vector<CollectiveCall>& calls);
void unpack(const std::string& bytes, RankResult& result, std::vector<CollectiveCall>& calls);

}  // namespace shardproof::verify
