// The random numbers of one rank, from explicit generators: LibTorch's default generator is shared
// by threads, and what each rank draws must depend on seed and mesh alone.
#pragma once
#include <ATen/core/Generator.h>

#include <cstdint>
#include <string_view>

#include "comm/mesh_shape.h"

namespace shardproof::comm {

class RandomStreams {
 public:
  RandomStreams(uint64_t seed, const MeshShape& shape, int world_rank, at::Device device);

  // The same numbers on all SP ranks of a data-parallel replica, others on every replica: noise and
  // timesteps of what SP ranks hold in common.
  at::Generator& replica() { return replica_; }
  // Other numbers on every rank: what belongs to this rank's shard alone.
  at::Generator& rank() { return rank_; }

  // Of the replica stream's present state: equal on SP ranks that have drawn the same numbers.
  uint64_t replica_fingerprint() const;

 private:
  at::Generator replica_;
  at::Generator rank_;
};

// A seed for stream `stream` of `seed` that has nothing in common with its neighbours' (SplitMix64,
// Steele, Lea, Flood 2014).
uint64_t derive_seed(uint64_t seed, uint64_t stream);
// The same for a stream that has a name (its FNV-1a hash), on every machine.
uint64_t derive_seed(uint64_t seed, std::string_view stream);

// A generator of its own on the device.
at::Generator make_generator(uint64_t seed, at::Device device);

}  // namespace shardproof::comm
