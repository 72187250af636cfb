// Where the ranks of a case run: virtual ranks in this process, or processes of which this is one.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "sim/world.h"
#include "verify/verdict/verdict.h"

namespace shardproof::verify {

// What one rank's program leaves behind: tensors on the CPU, by name.
using RankResult = std::map<std::string, at::Tensor>;
using RankProgram = std::function<RankResult(comm::BackendFactory& rank)>;

class RankWorld {
 public:
  virtual ~RankWorld() = default;
  virtual int size() const = 0;
  // Whether results come together in this process. Elsewhere run() leaves nothing to judge.
  virtual bool judges() const = 0;
  // For the next run. Errors (kBadInput): a world that cannot plant faults.
  virtual void plant(const sim::FaultPlan& faults) = 0;
  // Runs the program on every rank; `results` by rank. Errors: what the world's collectives or a
  // rank's program violate; results of ranks that returned are kept.
  virtual void run(const RankProgram& program, std::vector<RankResult>& results) = 0;
  // Of the last run, by rank.
  virtual const std::vector<CollectiveCall>& calls(int rank) const = 0;
  // What the world itself has to say about the last run.
  virtual std::vector<CheckResult> findings() const { return {}; }
};

class SimRankWorld final : public RankWorld {
 public:
  // Faults that the world has already stay beside those that are planted.
  explicit SimRankWorld(sim::World& world) : world_(world), standing_(world.options().faults) {}
  int size() const override { return world_.size(); }
  bool judges() const override { return true; }
  void plant(const sim::FaultPlan& faults) override;
  void run(const RankProgram& program, std::vector<RankResult>& results) override;
  const std::vector<CollectiveCall>& calls(int rank) const override { return world_.calls(rank); }

 private:
  sim::World& world_;
  sim::FaultPlan standing_;
};

// Worlds of the sizes that cases ask for.
class Worlds {
 public:
  virtual ~Worlds() = default;
  virtual RankWorld& get(int ranks) = 0;
  virtual at::Device device() const = 0;
};

// Simulated worlds by size, kept because threads and their library handles are dear.
class WorldPool final : public Worlds {
 public:
  explicit WorldPool(sim::WorldOptions options) : options_(std::move(options)) {}
  RankWorld& get(int ranks) override;
  at::Device device() const override { return options_.device; }

 private:
  struct Entry {
    std::unique_ptr<sim::World> world;
    std::unique_ptr<SimRankWorld> ranks;
  };
  sim::WorldOptions options_;
  std::map<int, Entry> worlds_;
};

}  // namespace shardproof::verify
