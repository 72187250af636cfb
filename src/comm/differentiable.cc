#include "comm/differentiable.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <numeric>

#include "comm/tag.h"

namespace shardproof::comm {
namespace {

namespace autograd = torch::autograd;
using at::Tensor;

struct GatherContext : torch::CustomClassHolder {
  Communicator group;
  std::vector<int64_t> rows;
  GatherAdjoint adjoint = GatherAdjoint::kSum;
  std::string path;
};

Tensor own_rows(const Tensor& x, const GatherContext& c) {
  const auto me = static_cast<size_t>(c.group.rank());
  const int64_t from = std::accumulate(c.rows.begin(), c.rows.begin() + c.group.rank(), int64_t{0});
  return x.narrow(1, from, c.rows[me]);
}

Tensor adjoint_of(const Tensor& dout, const GatherContext& c) {
  if (c.adjoint == GatherAdjoint::kOwnSlice) return own_rows(dout, c);
  if (c.adjoint == GatherAdjoint::kOwnSliceTimes) return own_rows(dout, c) * c.group.size();
  const bool low = dout.scalar_type() == at::kBFloat16 || dout.scalar_type() == at::kHalf;
  const Tensor wide = dout.to(low ? at::kFloat : dout.scalar_type());
  return c.group.reduce_scatter(wide.transpose(0, 1).contiguous(), c.rows)
      .wait()
      .to(dout.scalar_type())
      .transpose(0, 1);
}

class GatherRows : public autograd::Function<GatherRows> {
 public:
  static Tensor forward(autograd::AutogradContext* ctx, const Tensor& x,
                        c10::intrusive_ptr<GatherContext> context) {
    const Tensor all =
        context->group.all_gather(x.transpose(0, 1).contiguous(), context->rows).wait();
    context->path = current_path();
    ctx->saved_data["context"] = c10::IValue::make_capsule(std::move(context));
    return all.transpose(0, 1).contiguous();
  }
  static autograd::variable_list backward(autograd::AutogradContext* ctx,
                                          autograd::variable_list douts) {
    const auto capsule = ctx->saved_data["context"].toCapsule();
    const auto& context = static_cast<const GatherContext&>(*capsule);
    const MarkedScope scope(context.path, kAdjointMark);
    return {adjoint_of(douts[0], context), Tensor()};
  }
};

}  // namespace

Tensor gather_rows(const Tensor& x, const Communicator& group, const std::vector<int64_t>& rows,
                   GatherAdjoint adjoint, const std::string& site) {
  if (group.size() == 1) return x;
  auto context = c10::make_intrusive<GatherContext>();
  context->group = group;
  context->rows = rows;
  context->adjoint = adjoint;
  const CollectiveScope scope(site);
  return GatherRows::apply(x, std::move(context));
}

}  // namespace shardproof::comm
