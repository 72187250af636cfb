#include "attention/sequence_parallel.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

#include "attention/ring.h"
#include "attention/ulysses.h"
#include "base/error.h"
#include "comm/tag.h"

namespace shardproof::attention {

namespace autograd = torch::autograd;
using at::Tensor;
using comm::CollectiveScope;

// What the forward leaves for the backward.
struct ForwardState {
  Tensor q, k, v;  // [B, block rows, this rank's heads, D]
  Tensor out, lse;
  std::vector<Tensor> block_masks;
};

class SequenceParallelAttention::Impl {
 public:
  Impl(plan::AttentionPlan plan, const comm::Mesh& mesh,
       std::shared_ptr<const LocalAttention> local, MergeFunction merge)
      : plan_(std::move(plan)),
        ulysses_group_(mesh.ulysses()),
        ring_group_(mesh.ring()),
        sp_group_(mesh.sp()),
        sp_rank_(mesh.sp_rank()),
        local_(std::move(local)),
        merge_(std::move(merge)),
        ulysses_(plan_, ulysses_group_, sp_rank_) {
    SP_CHECK(mesh.shape().ring == plan_.mesh.ring && mesh.shape().ulysses == plan_.mesh.ulysses,
             "plan for {} on mesh {}", plan_.mesh.to_string(), mesh.shape().to_string());
  }

  const plan::AttentionPlan& plan() const { return plan_; }

  void check(const std::vector<StreamQkv>& streams, const Tensor& key_mask) const;
  SequenceParallelOutput forward(const std::vector<StreamQkv>& streams, const Tensor& key_mask,
                                 double scale, ForwardState& state) const;
  // One StreamQkv of gradients per stream, in the inputs' shapes.
  std::vector<StreamQkv> backward(const std::vector<Tensor>& douts, const ForwardState& state,
                                  double scale) const;

 private:
  plan::Interval rows(size_t stream) const {
    return plan_.streams[stream].shards[static_cast<size_t>(sp_rank_)];
  }
  bool replicated(size_t stream) const {
    return plan_.streams[stream].placement == plan::StreamPlacement::kReplicated;
  }
  const plan::HeadShard& heads() const {
    return plan_.heads[static_cast<size_t>(ulysses_group_.rank())];
  }
  // This rank's rows of a stream's tensor, pads excluded.
  Tensor own_rows(const Tensor& x, size_t stream) const {
    return x.narrow(1, replicated(stream) ? rows(stream).begin : 0, rows(stream).size());
  }
  Tensor put_back(const Tensor& own, size_t stream) const;
  std::vector<int64_t> rows_of_all(size_t stream) const;
  Tensor gather_stream(const Tensor& own, size_t stream) const;
  Tensor gather_adjoint(const Tensor& dout, size_t stream) const;
  std::vector<Tensor> masks_by_block(const Tensor& key_mask) const;
  Tensor clear_masked(const Tensor& x, const Tensor& key_mask, size_t stream) const;
  Ring ring(std::vector<Tensor> block_masks, double scale) const {
    return Ring(plan_, ring_group_, *local_, merge_, std::move(block_masks), heads().kv_of_q,
                scale);
  }

  plan::AttentionPlan plan_;
  comm::Communicator ulysses_group_, ring_group_, sp_group_;
  int sp_rank_;
  std::shared_ptr<const LocalAttention> local_;
  MergeFunction merge_;
  Ulysses ulysses_;
};

void SequenceParallelAttention::Impl::check(const std::vector<StreamQkv>& streams,
                                            const Tensor& key_mask) const {
  if (streams.size() != plan_.streams.size()) {
    bad_input("attention got {} streams; the plan has {}", streams.size(), plan_.streams.size());
  }
  const auto describe = [](const Tensor& x) {
    if (!x.defined()) return std::string("an undefined tensor");
    return fmt::format("{} {} on {}", c10::toString(x.scalar_type()), c10::str(x.sizes()),
                       x.device().str());
  };
  const auto rows_of = [&](size_t s) {
    return plan_.streams[s].local_rows[static_cast<size_t>(sp_rank_)];
  };
  const Tensor& first = streams[0].q;  // all others must be like it
  if (!first.defined() || first.dim() != 4) {
    bad_input("attention stream '{}', q on SP rank {}: expected a tensor [B, {}, {}, D], got {}",
              plan_.streams[0].name, sp_rank_, rows_of(0), plan_.q_heads, describe(first));
  }
  for (size_t s = 0; s < streams.size(); ++s) {
    const auto expect = [&](const Tensor& x, const char* name, int64_t heads) {
      const std::vector<int64_t> shape = {first.size(0), rows_of(s), heads, first.size(3)};
      if (x.defined() && x.sizes() == shape && x.scalar_type() == first.scalar_type() &&
          x.device() == first.device()) {
        return;
      }
      bad_input("attention stream '{}', {} on SP rank {}: expected {} {} on {}, got {}",
                plan_.streams[s].name, name, sp_rank_, c10::toString(first.scalar_type()),
                c10::str(at::IntArrayRef(shape)), first.device().str(), describe(x));
    };
    expect(streams[s].q, "q", plan_.q_heads);
    expect(streams[s].k, "k", plan_.kv_heads);
    expect(streams[s].v, "v", plan_.kv_heads);
  }
  if (!key_mask.defined()) return;
  const std::vector<int64_t> shape = {first.size(0), plan_.joint_tokens()};
  if (key_mask.scalar_type() != at::kBool || key_mask.sizes() != shape ||
      key_mask.device() != first.device()) {
    bad_input("attention key mask on SP rank {}: expected Bool {} on {}, got {}", sp_rank_,
              c10::str(at::IntArrayRef(shape)), first.device().str(), describe(key_mask));
  }
}

std::vector<Tensor> SequenceParallelAttention::Impl::masks_by_block(const Tensor& key_mask) const {
  std::vector<Tensor> masks(plan_.block_tokens.size());
  if (!key_mask.defined()) return masks;
  for (size_t r = 0; r < masks.size(); ++r) {
    const Tensor index = at::tensor(plan_.block_tokens[r], at::kLong).to(key_mask.device());
    masks[r] = key_mask.index_select(1, index);
  }
  return masks;
}

// A masked key has no weight, but 0 * NaN is NaN: what it holds must go before the arithmetic.
Tensor SequenceParallelAttention::Impl::clear_masked(const Tensor& x, const Tensor& key_mask,
                                                     size_t stream) const {
  if (!key_mask.defined()) return x;
  const Tensor mask =
      key_mask.narrow(1, plan_.stream_offset(stream) + rows(stream).begin, rows(stream).size());
  return x.masked_fill(mask.logical_not().unsqueeze(-1).unsqueeze(-1), 0);
}

std::vector<int64_t> SequenceParallelAttention::Impl::rows_of_all(size_t stream) const {
  std::vector<int64_t> counts;
  for (const plan::Interval& shard : plan_.streams[stream].shards) counts.push_back(shard.size());
  return counts;
}

// [B, own rows, H, D] -> [B, all tokens of the stream, H, D].
Tensor SequenceParallelAttention::Impl::gather_stream(const Tensor& own, size_t stream) const {
  const CollectiveScope scope(plan_.streams[stream].name + ".gather");
  return sp_group_.all_gather(own.transpose(0, 1).contiguous(), rows_of_all(stream))
      .wait()
      .transpose(0, 1)
      .contiguous();
}

Tensor SequenceParallelAttention::Impl::gather_adjoint(const Tensor& dout, size_t stream) const {
  using plan::GradientConvention;
  Tensor own = own_rows(dout, stream);
  if (plan_.convention == GradientConvention::kSliceThenScaleLoss) return own;
  if (plan_.convention == GradientConvention::kSliceTimesSp) return own * plan_.sp();
  const CollectiveScope scope(plan_.streams[stream].name + ".gather");
  const Tensor shares = dout.to(accumulate_type(dout.scalar_type())).transpose(0, 1).contiguous();
  return sp_group_.reduce_scatter(shares, rows_of_all(stream))
      .wait()
      .to(dout.scalar_type())
      .transpose(0, 1);
}

// Own rows into a tensor of the stream's local shape; the other rows are zeros.
Tensor SequenceParallelAttention::Impl::put_back(const Tensor& own, size_t stream) const {
  const int64_t n = plan_.streams[stream].local_rows[static_cast<size_t>(sp_rank_)];
  if (own.size(1) == n) return own.contiguous();
  Tensor whole = at::zeros({own.size(0), n, own.size(2), own.size(3)}, own.options());
  own_rows(whole, stream).copy_(own);
  return whole;
}

SequenceParallelOutput SequenceParallelAttention::Impl::forward(
    const std::vector<StreamQkv>& streams, const Tensor& key_mask, double scale,
    ForwardState& state) const {
  std::vector<std::vector<Tensor>> parts(3);
  for (size_t s = 0; s < streams.size(); ++s) {
    parts[0].push_back(own_rows(streams[s].q, s));
    parts[1].push_back(clear_masked(own_rows(streams[s].k, s), key_mask, s));
    parts[2].push_back(clear_masked(own_rows(streams[s].v, s), key_mask, s));
  }
  {
    const CollectiveScope scope("qkv.seq_to_head");
    const auto block = ulysses_.seq_to_head(qkv_route(plan_), parts);
    state.q = block[0], state.k = block[1], state.v = block[2];
  }
  state.block_masks = masks_by_block(key_mask);
  const AttentionOutput block = ring(state.block_masks, scale).forward(state.q, state.k, state.v);
  state.out = block.out, state.lse = block.lse;

  SequenceParallelOutput result;
  Tensor own;
  {
    const CollectiveScope scope("out.head_to_seq");
    own = ulysses_.head_to_seq(query_route(plan_), {block.out})[0];
  }
  int64_t at = 0;
  for (size_t s = 0; s < streams.size(); ++s) {
    const Tensor rows_of_stream = streams.size() == 1 ? own : own.narrow(1, at, rows(s).size());
    at += rows(s).size();
    Tensor out = replicated(s) && plan_.sp() > 1 ? gather_stream(rows_of_stream, s)
                                                 : put_back(rows_of_stream, s);
    // Outputs that are views, be it of one another, could not be changed in place: autograd refuses
    // that for what a custom function returns.
    if (streams.size() > 1 && out.is_alias_of(own)) out = out.clone(at::MemoryFormat::Contiguous);
    result.streams.push_back(std::move(out));
  }
  result.lse = block.lse;
  return result;
}

std::vector<StreamQkv> SequenceParallelAttention::Impl::backward(const std::vector<Tensor>& douts,
                                                                 const ForwardState& state,
                                                                 double scale) const {
  std::vector<Tensor> own;
  for (size_t s = 0; s < douts.size(); ++s) {
    own.push_back(replicated(s) && plan_.sp() > 1 ? gather_adjoint(douts[s], s)
                                                  : own_rows(douts[s], s));
  }
  Tensor dout;
  {
    const CollectiveScope scope("out.head_to_seq");
    dout = ulysses_.seq_to_head(query_route(plan_), {own})[0];
  }
  AttentionGradients g = ring(state.block_masks, scale)
                             .backward(dout, state.q, state.k, state.v, state.out, state.lse);
  std::vector<Tensor> parts;
  {
    const CollectiveScope scope("qkv.seq_to_head");
    // Moved, so that nobody else holds what is on its way.
    std::vector<Tensor> moved;
    for (Tensor* x : {&g.dq, &g.dk, &g.dv}) moved.push_back(std::move(*x));
    parts = ulysses_.head_to_seq(qkv_route(plan_), std::move(moved));
  }
  std::vector<StreamQkv> grads;
  int64_t at = 0;
  for (size_t s = 0; s < douts.size(); ++s) {
    const int64_t n = rows(s).size();
    grads.push_back({put_back(parts[0].narrow(1, at, n), s), put_back(parts[1].narrow(1, at, n), s),
                     put_back(parts[2].narrow(1, at, n), s)});
    at += n;
  }
  return grads;
}

namespace {

using Impl = SequenceParallelAttention::Impl;

// Inputs flattened as q_0, k_0, v_0, q_1, ...; outputs are the streams and the lse.
class AttentionFunction : public autograd::Function<AttentionFunction> {
 public:
  static autograd::variable_list forward(autograd::AutogradContext* ctx,
                                         std::shared_ptr<const Impl> impl, at::TensorList inputs,
                                         const Tensor& key_mask, double scale) {
    std::vector<StreamQkv> streams;
    for (size_t i = 0; i < inputs.size(); i += 3) {
      streams.push_back({inputs[i], inputs[i + 1], inputs[i + 2]});
    }
    ForwardState state;
    const bool masked = key_mask.numel() > 0;
    const SequenceParallelOutput result =
        impl->forward(streams, masked ? key_mask : Tensor(), scale, state);
    autograd::variable_list saved = {state.q, state.k, state.v, state.out, state.lse};
    if (masked) {
      saved.insert(saved.end(), state.block_masks.begin(), state.block_masks.end());
    }
    ctx->save_for_backward(saved);
    auto context = c10::make_intrusive<Context>();
    context->impl = std::move(impl);
    context->path = comm::current_path();
    context->streams = streams.size();
    context->scale = scale;
    ctx->saved_data["context"] = c10::IValue::make_capsule(std::move(context));
    autograd::variable_list outputs = result.streams;
    outputs.push_back(result.lse);
    ctx->mark_non_differentiable({result.lse});
    return outputs;
  }

  static autograd::variable_list backward(autograd::AutogradContext* ctx,
                                          autograd::variable_list douts) {
    const auto capsule = ctx->saved_data["context"].toCapsule();
    const auto& context = static_cast<const Context&>(*capsule);
    const autograd::variable_list saved = ctx->get_saved_variables();
    ForwardState state{saved[0], saved[1], saved[2], saved[3], saved[4], {}};
    state.block_masks.assign(saved.begin() + 5, saved.end());
    state.block_masks.resize(context.impl->plan().block_tokens.size());
    douts.resize(context.streams);
    const comm::MarkedScope scope(context.path, comm::kAdjointMark);
    autograd::variable_list grads = {Tensor()};
    for (const StreamQkv& g : context.impl->backward(douts, state, context.scale)) {
      grads.insert(grads.end(), {g.q, g.k, g.v});
    }
    grads.insert(grads.end(), {Tensor(), Tensor()});
    return grads;
  }

 private:
  struct Context : torch::CustomClassHolder {
    std::shared_ptr<const Impl> impl;
    std::string path;
    size_t streams = 0;
    double scale = 0;
  };
};

}  // namespace

SequenceParallelAttention::SequenceParallelAttention(plan::AttentionPlan plan,
                                                     const comm::Mesh& mesh,
                                                     std::shared_ptr<const LocalAttention> local,
                                                     MergeFunction merge)
    : impl_(std::make_shared<Impl>(std::move(plan), mesh, std::move(local), std::move(merge))) {}

const plan::AttentionPlan& SequenceParallelAttention::plan() const { return impl_->plan(); }

SequenceParallelOutput SequenceParallelAttention::operator()(const std::vector<StreamQkv>& streams,
                                                             const Tensor& key_mask,
                                                             std::optional<double> scale) const {
  impl_->check(streams, key_mask);
  std::vector<Tensor> inputs;
  for (const StreamQkv& s : streams) inputs.insert(inputs.end(), {s.q, s.k, s.v});
  // An undefined tensor is not a valid argument of an autograd function: an empty one stands for
  // it.
  const Tensor mask =
      key_mask.defined() ? key_mask : at::empty({0}, inputs[0].options().dtype(at::kBool));
  auto outputs = AttentionFunction::apply(
      impl_, at::TensorList(inputs), mask,
      scale.value_or(1.0 / std::sqrt(static_cast<double>(inputs[0].size(-1)))));
  SequenceParallelOutput result;
  result.lse = outputs.back();
  outputs.pop_back();
  result.streams = std::move(outputs);
  return result;
}

}  // namespace shardproof::attention
