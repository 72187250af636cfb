#include "attention/cross_attention.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

namespace shardproof::attention {
namespace {

namespace autograd = torch::autograd;
using at::Tensor;

struct Context : torch::CustomClassHolder {
  std::shared_ptr<const LocalAttention> local;
  double scale = 1;
};

class CrossAttention : public autograd::Function<CrossAttention> {
 public:
  static Tensor forward(autograd::AutogradContext* ctx, c10::intrusive_ptr<Context> context,
                        const Tensor& q, const Tensor& k, const Tensor& v) {
    const AttentionOutput result = context->local->forward(q, k, v, {}, context->scale);
    ctx->save_for_backward({q, k, v, result.out, result.lse});
    ctx->saved_data["context"] = c10::IValue::make_capsule(std::move(context));
    return result.out;
  }
  static autograd::variable_list backward(autograd::AutogradContext* ctx,
                                          autograd::variable_list douts) {
    const auto capsule = ctx->saved_data["context"].toCapsule();
    const auto& context = static_cast<const Context&>(*capsule);
    const auto s = ctx->get_saved_variables();
    const AttentionGradients g =
        context.local->backward(douts[0], s[0], s[1], s[2], s[3], s[4], {}, context.scale);
    return {Tensor(), g.dq, g.dk, g.dv};
  }
};

}  // namespace

Tensor cross_attention(std::shared_ptr<const LocalAttention> local, const Tensor& q,
                       const Tensor& k, const Tensor& v) {
  auto context = c10::make_intrusive<Context>();
  context->local = std::move(local);
  context->scale = 1.0 / std::sqrt(static_cast<double>(q.size(-1)));
  return CrossAttention::apply(std::move(context), q, k, v);
}

}  // namespace shardproof::attention
