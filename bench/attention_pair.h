// The same attention, forward and backward, without and with virtual ranks.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "attention/local_attention.h"
#include "plan/attention_plan.h"
#include "sim/world.h"

namespace shardproof::bench {

struct Shape {
  int64_t tokens = 0;
  int64_t heads = 0;
  int64_t head_dim = 0;
  bool operator==(const Shape&) const = default;
};

// Of the whole, or of one rank's rows.
struct AttentionResults {
  at::Tensor out, dq, dk, dv;
};

// Inputs [1,S,H,D] of the whole attention and the backend that computes it, or any part of it.
struct AttentionWork {
  AttentionWork(Shape shape, at::ScalarType dtype, at::Device device, const std::string& backend);
  // Without ranks, by this thread and its intra-op threads.
  AttentionResults run() const;

  Shape shape;
  at::Tensor q, k, v, dout;
  double scale;
  std::shared_ptr<const attention::LocalAttention> local;
};

// How many ranks do it, and with what.
struct SimSetup {
  std::string mode;  // local, ulysses, ring, allgather, hybrid, hybrid_allgather
  int sp = 1;
  bool checks = true;
  int cores = 1;
};

// The mesh of `mode` with `sp` ranks; hybrids have ring = 2. Errors (kBadInput): unknown mode, a
// hybrid of fewer than four ranks or of an odd number.
comm::MeshShape mesh_of(const std::string& mode, int sp);

// Waits for the device; nothing to do on a CPU.
void synchronize(at::Device device);

struct Seconds {
  double wall = 0;
  double cpu = 0;  // of all threads of the process
};

// Both sides of the comparison, warmed up. The world, its ranks' shards and all that is needed
// once a process is made beforehand; meshes, the plan's execution and autograd are measured.
class AttentionPair {
 public:
  // Runs both sides once and compares them. Errors (kInternal): the results differ.
  AttentionPair(std::shared_ptr<const AttentionWork> work, SimSetup setup);

  // Per execution; short work is executed often enough for the clock.
  Seconds time_whole();
  Seconds time_sim();

 private:
  struct Shard {
    plan::Interval rows;
    at::Tensor q, k, v, dout;
  };
  void make_shards();
  AttentionResults run_rank(sim::RankContext& rank) const;
  void run_sim();
  void warm_up();
  template <class Function>
  Seconds time(const Function& run);

  std::shared_ptr<const AttentionWork> work_;
  SimSetup setup_;
  plan::AttentionPlan plan_;
  sim::World world_;
  std::vector<Shard> shards_;
  int executions_ = 1;
};

}  // namespace shardproof::bench
