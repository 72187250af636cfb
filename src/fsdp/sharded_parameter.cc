#include "fsdp/sharded_parameter.h"

#include <ATen/ATen.h>

#include "base/error.h"

namespace shardproof::fsdp {
namespace {

using at::Tensor;

// A scalar has one row.
Tensor as_rows(const Tensor& x) { return x.dim() == 0 ? x.view({1}) : x; }

void set_storage(const Tensor& x, bool there) {
  c10::StorageImpl* storage = x.storage().unsafeGetStorageImpl();
  const size_t bytes = there ? static_cast<size_t>(x.numel()) * x.element_size() : 0;
  storage->set_data_ptr_noswap(there ? storage->allocator()->allocate(bytes)
                                     : at::DataPtr(nullptr, x.device()));
  storage->set_nbytes(bytes);
}

}  // namespace

ShardedParameter::ShardedParameter(const models::ParameterSpec& spec, const Tensor& whole,
                                   ShardLayout layout, int index, const Policy& policy,
                                   at::Device device)
    : name_(spec.name),
      shape_(spec.shape),
      layout_(layout),
      index_(index),
      trained_(!spec.frozen && !spec.buffer),
      param_dtype_(policy.param_dtype),
      reduce_dtype_(policy.reduce_dtype),
      device_(device) {
  const at::NoGradGuard no_grad;
  // What is not trained needs no more digits than are computed with.
  const auto kept_on = at::TensorOptions(policy.offload ? at::Device(at::kCPU) : device)
                           .dtype(trained_ ? policy.master_dtype : policy.param_dtype)
                           .pinned_memory(policy.offload && device.is_cuda());
  const plan::Interval own = layout_.shard(index);
  padded_ = at::zeros(with_rows(shape_, layout_.chunk()), kept_on);
  rows_ = padded_.narrow(0, 0, own.size());
  rows_.copy_(as_rows(whole).narrow(0, own.begin, own.size()));
  storage_ = at::empty(with_rows(shape_, layout_.shards * layout_.chunk()),
                       at::TensorOptions(device).dtype(param_dtype_));
  renew_whole();
  set_storage(storage_, false);
}

const Tensor& ShardedParameter::renew_whole() {
  const at::NoGradGuard no_grad;
  whole_ = storage_.narrow(0, 0, layout_.rows).view(shape_).detach().requires_grad_(trained_);
  return whole_;
}

TrainedTensor ShardedParameter::trained_tensor() const {
  return {name_, rows_, grad_.defined() ? grad_ : at::zeros_like(rows_), replicated()};
}

Tensor ShardedParameter::gather_input() const {
  return padded_.to(at::TensorOptions(device_).dtype(param_dtype_), /*non_blocking=*/true);
}

Tensor ShardedParameter::allocate() {
  SP_CHECK(!is_whole(), "parameter '{}' is gathered twice", name_);
  set_storage(storage_, true);
  // A version counter of its own: graphs that hold the parameter must not take it for changed.
  return storage_.variable_data();
}

void ShardedParameter::free() { set_storage(storage_, false); }

bool ShardedParameter::is_whole() const {
  return storage_.numel() == 0 || storage_.storage().nbytes() > 0;
}

Tensor ShardedParameter::take_gradient() {
  const at::NoGradGuard no_grad;
  keep_gradient();
  Tensor whole = std::exchange(kept_, Tensor());
  const auto shape = with_rows(shape_, layout_.shards * layout_.chunk());
  if (!whole.defined()) {
    return at::zeros(shape, at::TensorOptions(device_).dtype(reduce_dtype_));
  }
  whole = as_rows(whole);
  if (whole.size(0) == shape[0]) return whole.contiguous();
  Tensor padded = at::zeros(shape, whole.options());
  padded.narrow(0, 0, layout_.rows).copy_(whole);
  return padded;
}

void ShardedParameter::keep_gradient() {
  const at::NoGradGuard no_grad;
  const Tensor grad = std::exchange(whole_.mutable_grad(), Tensor());
  if (!grad.defined()) return;
  if (kept_.defined()) {
    kept_.add_(grad);
  } else {
    kept_ = grad.to(reduce_dtype_);
  }
}

void ShardedParameter::add_reduced(const Tensor& sum, int ranks) {
  const at::NoGradGuard no_grad;
  const Tensor mean = own_rows(sum).div(ranks).to(rows_.options());
  grad_ = grad_.defined() ? grad_.add_(mean) : mean;
}

Tensor ShardedParameter::own_rows(const Tensor& padded) const {
  return padded.narrow(0, 0, rows_.size(0));
}

}  // namespace shardproof::fsdp
