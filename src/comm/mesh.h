// The groups of one rank in the mesh (dp, ring, ulysses).
#pragma once
#include "comm/communicator.h"
#include "comm/mesh_shape.h"

namespace shardproof::comm {

class Mesh {
 public:
  // Collective over the whole world. Errors (kBadInput): the shape's world is not the transport's.
  Mesh(BackendFactory& factory, MeshShape shape);

  const MeshShape& shape() const { return shape_; }
  MeshCoordinates at() const { return at_; }
  int sp_rank() const { return at_.ring * shape_.ulysses + at_.ulysses; }
  at::Device device() const { return device_; }

  const Communicator& dp() const { return dp_; }
  const Communicator& ring() const { return ring_; }
  const Communicator& ulysses() const { return ulysses_; }
  const Communicator& sp() const { return sp_; }

 private:
  MeshShape shape_;
  MeshCoordinates at_;
  at::Device device_;
  Communicator dp_, ring_, ulysses_, sp_;
};

}  // namespace shardproof::comm
