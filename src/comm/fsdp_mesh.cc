#include "comm/fsdp_mesh.h"

#include "base/error.h"

namespace shardproof::comm {
namespace {

// Ranks first, first + stride, ...
Communicator make_group(BackendFactory& factory, const char* name, int first, int stride,
                        int count) {
  std::vector<int> ranks;
  for (int i = 0; i < count; ++i) ranks.push_back(first + i * stride);
  if (count == 1) return Communicator(name, first);
  auto backend = factory.create(name, ranks);
  return Communicator(std::move(backend), name, std::move(ranks));
}

}  // namespace

FsdpMesh::FsdpMesh(BackendFactory& factory, int shards) : device_(factory.device()) {
  const int world = factory.world_size(), rank = factory.rank();
  if (shards < 1 || world % shards != 0) {
    bad_input("fsdp {}: expected a number of shards that divides the world of {} ranks", shards,
              world);
  }
  shards_ = make_group(factory, "fsdp", rank / shards * shards, 1, shards);
  replicas_ = make_group(factory, "replicate", rank % shards, shards, world / shards);
  world_ = make_group(factory, "world", 0, 1, world);
}

}  // namespace shardproof::comm
