// A world of virtual ranks: n threads of this process run one SPMD function, each with a
// c10d::Backend per group whose collectives are matched, delivered late, checked and, on request,
// broken. See docs/design.md, sim.
//
//   sim::World world(4);
//   world.run([](sim::RankContext& rank) {
//     comm::Mesh mesh(rank, {.ulysses = 4});
//     ...
//   });
//
// The threads live as long as the World (cuDNN plans and cuBLAS handles are per thread). On a CPU
// every rank computes with one intra-op thread and `cores` ranks run at once; on CUDA one rank runs
// at a time. Backward passes run on the rank's own thread, so collectives in them cannot deadlock.
// Results never depend on the interleaving: `schedule_seed` exists to show it.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

#include "base/collective_call.h"
#include "comm/communicator.h"
#include "sim/engine/rendezvous.h"
#include "sim/fault_plan.h"
#include "sim/memory_ledger.h"

namespace shardproof::sim {

enum class ReduceOrder {
  kRank,     // rank 0, 1, 2, ... in fp32 or better, rounded once
  kNcclRing  // chunk c starts at rank c+1 and is rounded to the dtype at every hop, as NCCL's ring
};

struct WorldOptions {
  at::Device device = at::kCPU;
  int cores = 0;  // ranks that run at once; 0: all cores (CPU), 1 (CUDA)
  uint64_t schedule_seed = 0;
  // Poison outputs until the wait, checksum inputs in flight. Off: for timing only.
  bool delivery_checks = true;
  // On a device, what was in flight is compared at the end of every run, which waits for the
  // device. Off: it adds up until World::check_races() is called, so that runs follow one another
  // without a gap (training loops, timing).
  bool check_races_every_run = true;
  bool track_memory = false;
  ReduceOrder reduce_order = ReduceOrder::kRank;
  FaultPlan faults;
};

class World;

// What a rank's function gets; also the factory of its groups' backends.
class RankContext final : public comm::BackendFactory {
 public:
  RankContext(World& world, int rank) : world_(world), rank_(rank) {}
  int rank() const override { return rank_; }
  int world_size() const override;
  at::Device device() const override;
  c10::intrusive_ptr<c10d::Backend> create(const std::string& name,
                                           const std::vector<int>& ranks) override;

 private:
  World& world_;
  int rank_;
};

class World {
 public:
  explicit World(int ranks, WorldOptions options = {});
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  int size() const;
  const WorldOptions& options() const;
  // For the runs that follow.
  void set_faults(FaultPlan faults);

  // Runs `fn` on every rank and returns when all have returned. Errors: CollectiveError
  // (kViolation) for whatever the collectives violate; if a rank throws, CollectiveError
  // kRankFailed with the category of its error.
  void run(const std::function<void(RankContext&)>& fn);

  // The same for ranks whose threads the caller made (a trainer that starts a thread a rank): the
  // calling thread is `rank` until `fn` has returned on every rank. Call it once for each rank,
  // each from its own thread; nobody computes before all have come, so a rank that never calls
  // makes the others wait for it. Every caller gets the error that run() would throw. While `fn`
  // runs the thread computes with one intra-op thread; its settings are restored.
  // Errors: kBadInput for a rank outside the world, or one that is already in this run.
  void adopt(int rank, const std::function<void(RankContext&)>& fn);

  // Throws CollectiveError (kRace) for buffers on a device that were overwritten in flight since
  // the last check. Waits for the device.
  void check_races();

  // Of the last run.
  const std::vector<CollectiveCall>& calls(int rank) const;
  MemoryUse memory(int rank) const;  // needs track_memory; of the present run, from inside
  void restart_peak(int rank);       // the peak from now on

  class Impl;

 private:
  friend class RankContext;
  std::unique_ptr<Impl> impl_;
};

}  // namespace shardproof::sim
