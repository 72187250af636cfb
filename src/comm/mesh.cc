#include "comm/mesh.h"

#include "base/error.h"

namespace shardproof::comm {
namespace {

Communicator make_group(BackendFactory& factory, const MeshShape& shape, const char* dimension) {
  std::vector<int> ranks = group_ranks(shape, factory.rank(), dimension);
  if (ranks.size() == 1) return Communicator(dimension, ranks[0]);
  auto backend = factory.create(dimension, ranks);
  return Communicator(std::move(backend), dimension, std::move(ranks));
}

}  // namespace

Mesh::Mesh(BackendFactory& factory, MeshShape shape) : shape_(shape), device_(factory.device()) {
  shape.check();
  if (shape.world() != factory.world_size()) {
    bad_input("mesh {} needs {} ranks; the world has {}", shape.to_string(), shape.world(),
              factory.world_size());
  }
  at_ = coordinates(shape, factory.rank());
  dp_ = make_group(factory, shape, "dp");
  ring_ = make_group(factory, shape, "ring");
  ulysses_ = make_group(factory, shape, "ulysses");
  sp_ = make_group(factory, shape, "sp");
}

}  // namespace shardproof::comm
