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
  // Collective. A program that refuses its input (kBadInput) before it communicates does so on all
  // ranks alike: the judging rank passes that on. If this rank's program throws otherwise, all
  // others are told and end; the error names the collective that was the rank's last.
  void run(const RankProgram& program, std::vector<RankResult>& results) override;
  const std::vector<CollectiveCall>& calls(int rank) const override;
  // "trace": whether the calls that were recorded on the way in are those that the backend itself
  // has recorded (NCCL's flight recorder).
  std::vector<CheckResult> findings() const override { return findings_; }

 private:
  [[noreturn]] void fail(const std::string& what);
  std::string others() const;
  void collect(const std::vector<std::string>& reports, std::vector<RankResult>& results);

  comm::ProcessWorld& world_;
  std::vector<std::vector<CollectiveCall>> calls_;
  std::vector<CheckResult> findings_;
};

// The first of our calls that the flight recorder does not have, or has otherwise; empty if they
// agree in kind, order and elements.
std::string flight_difference(const std::vector<CollectiveCall>& calls,
                              const std::vector<comm::FlightRecord>& records);

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

// What a rank has to tell, as bytes, and back. Errors (kInternal): bytes that end too early.
struct RankReport {
  RankResult result;
  std::vector<CollectiveCall> calls;
  std::string flight_difference;
  std::string refusal;  // why the program refused before it communicated; empty if it ran
};
std::string pack(const RankReport& report);
RankReport unpack(const std::string& bytes);

}  // namespace shardproof::verify
