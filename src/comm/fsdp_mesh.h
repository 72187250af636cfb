// The groups of one rank for FSDP: a second view of the world, beside (dp, ring, ulysses).
#pragma once
#include "comm/communicator.h"

namespace shardproof::comm {

// `shards` consecutive ranks hold the parameters once; with fewer shards than ranks the copies are
// replicas of one another (HSDP; torch: hybrid sharding).
class FsdpMesh {
 public:
  // Collective over the world. Errors (kBadInput): a number of shards that does not divide it.
  FsdpMesh(BackendFactory& factory, int shards);

  const Communicator& shards() const { return shards_; }      // one copy of the parameters
  const Communicator& replicas() const { return replicas_; }  // holders of the same shard
  const Communicator& world() const { return world_; }
  at::Device device() const { return device_; }

 private:
  Communicator shards_, replicas_, world_;
  at::Device device_;
};

}  // namespace shardproof::comm
