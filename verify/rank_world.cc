#include "verify/rank_world.h"

namespace shardproof::verify {

void SimRankWorld::plant(const sim::FaultPlan& faults) {
  sim::FaultPlan all = standing_;
  all.insert(all.end(), faults.begin(), faults.end());
  world_.set_faults(all);
}

void SimRankWorld::run(const RankProgram& program, std::vector<RankResult>& results) {
  results.assign(static_cast<size_t>(size()), {});
  world_.run(
      [&](sim::RankContext& rank) { results[static_cast<size_t>(rank.rank())] = program(rank); });
}

RankWorld& WorldPool::get(int ranks) {
  Entry& entry = worlds_[ranks];
  if (!entry.world) {
    entry.world = std::make_unique<sim::World>(ranks, options_);
    entry.ranks = std::make_unique<SimRankWorld>(*entry.world);
  }
  return *entry.ranks;
}

}  // namespace shardproof::verify
