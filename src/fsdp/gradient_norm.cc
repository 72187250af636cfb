#include "fsdp/gradient_norm.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace shardproof::fsdp {
namespace {

// fp64 [1] on the gradients' device; nothing waits for the device.
at::Tensor sum_of_squares(const std::vector<at::Tensor>& norms, at::Device device) {
  if (norms.empty()) return at::zeros({1}, at::TensorOptions(device).dtype(at::kDouble));
  return at::stack(norms).square_().sum(0, /*keepdim=*/true);
}

}  // namespace

double gradient_norm(const std::vector<TrainedTensor>& tensors, const comm::Communicator& shards,
                     at::Device device) {
  if (tensors.empty()) return 0;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> sharded, replicated;
  for (const TrainedTensor& tensor : tensors) {
    SP_CHECK(tensor.grad.defined(), "{} has no gradient", tensor.name);
    (tensor.replicated ? replicated : sharded)
        .push_back(at::linalg_vector_norm(tensor.grad, 2, {}, false, at::kDouble));
  }
  const at::Device grads_on = tensors[0].grad.device();
  // Every rank adds its part of a replicated tensor, so that ranks agree even where copies do not:
  // a NaN in one of them reaches all.
  at::Tensor squares = sum_of_squares(sharded, grads_on);
  squares.add_(sum_of_squares(replicated, grads_on).div_(shards.size()));
  return std::sqrt(shards.all_reduce(squares.to(device)).wait().item<double>());
}

void clip_gradients(const std::vector<TrainedTensor>& tensors, double norm, double max_norm) {
  SP_CHECK(std::isfinite(norm), "gradient norm {}", norm);
  SP_CHECK(max_norm > 0, "largest gradient norm {}", max_norm);
  const double factor = std::min(1.0, max_norm / (norm + 1e-6));
  if (factor == 1) return;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> grads;
  for (const TrainedTensor& tensor : tensors) {
    if (tensor.grad.numel() > 0) grads.push_back(tensor.grad);
  }
  if (!grads.empty()) at::_foreach_mul_(grads, factor);
}

}  // namespace shardproof::fsdp
