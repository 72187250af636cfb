// One parameter under FSDP: this rank's rows, and the whole for as long as it is needed.
#pragma once
#include <ATen/core/Tensor.h>

#include "fsdp/policy.h"
#include "fsdp/shard_layout.h"
#include "fsdp/trained_tensor.h"
#include "models/parameters.h"

namespace shardproof::fsdp {

// The whole is a leaf of autograd whose storage comes and goes, so that graphs may hold it while no
// memory does. Whoever computes with it, forward or backward, must have gathered it. Each run of a
// block has a leaf of its own over the same storage: autograd accumulates into a leaf when all its
// uses have their gradients, so that with one leaf the whole gradients of all blocks would wait for
// the first run's backward. Shards and what travels have layout.chunk() rows, pads (zeros) at the
// end.
class ShardedParameter {
 public:
  // Copies this rank's rows out of `whole` (any device and dtype; pages of a mapped file that other
  // ranks hold are not touched). `index`: this rank's shard.
  ShardedParameter(const models::ParameterSpec& spec, const at::Tensor& whole, ShardLayout layout,
                   int index, const Policy& policy, at::Device device);

  const std::string& name() const { return name_; }
  bool trained() const { return trained_; }
  bool replicated() const { return layout_.shards == 1; }
  const ShardLayout& layout() const { return layout_; }
  int index() const { return index_; }
  const std::vector<int64_t>& shape() const { return shape_; }  // of the whole
  // What the model reads, [shape()], and whose gradient is taken.
  const at::Tensor& whole() const { return whole_; }
  // A new leaf becomes the whole; one that was before does again.
  const at::Tensor& renew_whole();
  void set_whole(at::Tensor leaf) { whole_ = std::move(leaf); }
  // This rank's rows, and their gradient since the last zero_grad() (zeros if there was none).
  TrainedTensor trained_tensor() const;
  at::Tensor rows() const { return rows_; }

  // What this rank sends, in the policy's param_dtype: [chunk, ...].
  at::Tensor gather_input() const;
  // Gives the whole its storage, undefined bytes: [shards*chunk, ...].
  at::Tensor allocate();
  void free();
  bool is_whole() const;

  // The gradient of the whole that autograd has left, taken away from it, and what was kept before:
  // [shards*chunk, ...] in the policy's reduce_dtype; zeros if there is none.
  at::Tensor take_gradient();
  // Keeps autograd's gradient, whole, for a later take_gradient() (deferred synchronisation).
  void keep_gradient();
  // Adds a sum over `ranks` ranks, [chunk, ...], as their mean to the shard's gradient.
  void add_reduced(const at::Tensor& sum, int ranks);
  void zero_grad() { grad_ = at::Tensor(); }

 private:
  at::Tensor own_rows(const at::Tensor& padded) const;

  std::string name_;
  std::vector<int64_t> shape_;
  ShardLayout layout_;
  int index_;
  bool trained_;
  at::ScalarType param_dtype_, reduce_dtype_;
  at::Device device_;
  at::Tensor padded_;   // shard with pads, master dtype
  at::Tensor rows_;     // the shard without
  at::Tensor grad_;     // of rows_
  at::Tensor storage_;  // [shards*chunk, ...], shares its storage with whole_
  at::Tensor whole_;
  at::Tensor kept_;  // gradient of the whole, reduce dtype
};

}  // namespace shardproof::fsdp
