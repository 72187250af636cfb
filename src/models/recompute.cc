#include "models/recompute.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "comm/tag.h"

namespace shardproof::models {
namespace {

namespace autograd = torch::autograd;
using at::Tensor;

struct BlockContext : torch::CustomClassHolder {
  Block block;
  std::string path;
};

class Recompute : public autograd::Function<Recompute> {
 public:
  static autograd::variable_list forward(autograd::AutogradContext* ctx,
                                         c10::intrusive_ptr<BlockContext> context,
                                         at::TensorList inputs, const Tensor& /*dummy*/) {
    ctx->save_for_backward(inputs.vec());
    std::vector<Tensor> outputs = context->block(inputs.vec());
    context->path = comm::current_path();
    ctx->saved_data["context"] = c10::IValue::make_capsule(std::move(context));
    return outputs;
  }

  static autograd::variable_list backward(autograd::AutogradContext* ctx,
                                          const autograd::variable_list& douts) {
    const auto capsule = ctx->saved_data["context"].toCapsule();
    const auto& context = static_cast<const BlockContext&>(*capsule);
    std::vector<Tensor> inputs;
    for (const Tensor& saved : ctx->get_saved_variables()) {
      inputs.push_back(saved.detach().requires_grad_(at::isFloatingType(saved.scalar_type())));
    }
    std::vector<Tensor> outputs;
    {
      const at::AutoGradMode grad(true);
      const comm::MarkedScope scope(context.path, comm::kRecomputeMark);
      outputs = context.block(inputs);
    }
    autograd::backward(outputs, douts);
    autograd::variable_list grads = {Tensor()};
    for (const Tensor& input : inputs) grads.push_back(input.grad());
    grads.emplace_back();
    return grads;
  }
};

}  // namespace

std::vector<Tensor> recompute(const Block& block, const std::vector<Tensor>& inputs) {
  auto context = c10::make_intrusive<BlockContext>();
  context->block = block;
  // Without an input that requires grad (frozen embeddings under LoRA) autograd would skip the node
  // and lose the block's parameter gradients.
  const Tensor dummy = at::zeros({1}, at::kFloat).requires_grad_(true);
  return Recompute::apply(std::move(context), at::TensorList(inputs), dummy);
}

}  // namespace shardproof::models
