#include "verify/matched/matched_context.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "base/error.h"

namespace shardproof::verify {

namespace autograd = torch::autograd;
using at::Tensor;
using Values = Lockstep::Values;

namespace {

// A meeting in the forward and its adjoint in the backward, of one chunk.
struct Meeting : torch::CustomClassHolder {
  Lockstep* lockstep = nullptr;
  int chunk = 0;
  std::string what;
  Lockstep::Compute forward, backward;
  size_t outputs = 0;  // those behind the first so many are kept for the backward
};

// The backward's values: the cotangents, then what the forward kept.
class MeetingFunction : public autograd::Function<MeetingFunction> {
 public:
  static autograd::variable_list forward(autograd::AutogradContext* ctx,
                                         c10::intrusive_ptr<Meeting> meeting, at::TensorList mine) {
    Values results =
        meeting->lockstep->meet(meeting->chunk, meeting->what, mine.vec(), meeting->forward);
    const auto kept = results.begin() + static_cast<int64_t>(meeting->outputs);
    ctx->save_for_backward({kept, results.end()});
    results.erase(kept, results.end());
    ctx->saved_data["meeting"] = c10::IValue::make_capsule(std::move(meeting));
    return results;
  }

  static autograd::variable_list backward(autograd::AutogradContext* ctx,
                                          autograd::variable_list cotangents) {
    const auto capsule = ctx->saved_data["meeting"].toCapsule();
    auto& meeting = static_cast<Meeting&>(*capsule);
    for (const Tensor& kept : ctx->get_saved_variables()) cotangents.push_back(kept);
    autograd::variable_list grads = {Tensor()};
    for (Tensor& grad : meeting.lockstep->meet(meeting.chunk, meeting.what + " backward",
                                               std::move(cotangents), meeting.backward)) {
      grads.push_back(std::move(grad));
    }
    return grads;
  }
};

// Everybody's rows of the cotangent as the convention of the gather says, by chunk.
std::vector<Values> scatter(const std::vector<Values>& cotangents, const plan::StreamPlan& stream,
                            plan::GradientConvention convention) {
  using plan::GradientConvention;
  const at::ScalarType narrow = cotangents[0][0].scalar_type();
  const at::ScalarType type = attention::accumulate_type(narrow);
  Tensor sum;
  if (convention == GradientConvention::kSumThenSlice) {
    for (const Values& mine : cotangents) {
      sum = sum.defined() ? sum + mine[0].to(type) : mine[0].to(type);
    }
    sum = sum.to(narrow);
  }
  std::vector<Values> results;
  for (size_t c = 0; c < cotangents.size(); ++c) {
    const plan::Interval rows = stream.shards[c];
    Tensor own = (sum.defined() ? sum : cotangents[c][0]).narrow(1, rows.begin, rows.size());
    if (convention == GradientConvention::kSliceTimesSp) {
      own = own * static_cast<int64_t>(cotangents.size());
    }
    results.push_back({own});
  }
  return results;
}

}  // namespace

plan::AttentionPlan MatchedContext::plan(
    const std::vector<std::pair<std::string, int64_t>>& streams, int64_t heads) const {
  AttentionCase counted = layout_;
  counted.text = counted.image = 0;
  for (const auto& [name, tokens] : streams) {
    (name == "text" ? counted.text : counted.image) = tokens;
  }
  counted.heads = counted.kv_heads = heads;
  return count_chunks(counted, streams);
}

Tensor MatchedContext::own_rows(const Tensor& x, const plan::StreamPlan& stream,
                                int64_t dim) const {
  if (stream.placement == plan::StreamPlacement::kReplicated) return x;
  const auto chunk = static_cast<size_t>(chunk_);
  std::vector<int64_t> rows;
  for (int64_t t = stream.shards[chunk].begin; t < stream.shards[chunk].end; ++t) rows.push_back(t);
  const Tensor own = x.index_select(dim, at::tensor(rows, at::kLong).to(x.device()));
  auto shape = x.sizes().vec();
  int64_t& pads = shape[static_cast<size_t>(dim)];
  pads = stream.local_rows[chunk] - own.size(dim);
  return pads == 0 ? own : at::cat({own, at::zeros(shape, x.options())}, dim);
}

models::JointAttention MatchedContext::attention(plan::AttentionPlan plan, at::ScalarType dtype,
                                                 bool masked) const {
  const auto attend = std::make_shared<const MatchedAttention>(
      std::move(plan), attention::make_local_attention(options().backend, device(), dtype, masked));
  return [attend, lockstep = &lockstep_, chunk = chunk_](
             const std::vector<attention::StreamQkv>& streams, const Tensor& key_mask) {
    auto meeting = c10::make_intrusive<Meeting>();
    meeting->lockstep = lockstep;
    meeting->chunk = chunk;
    meeting->what = "attention";
    meeting->forward = [attend, key_mask](const std::vector<Values>& chunks) {
      return attend->forward(chunks, key_mask);
    };
    meeting->backward = [attend, key_mask](const std::vector<Values>& chunks) {
      return attend->backward(chunks, key_mask);
    };
    meeting->outputs = streams.size();
    std::vector<Tensor> mine;
    for (const attention::StreamQkv& x : streams) mine.insert(mine.end(), {x.q, x.k, x.v});
    return attention::SequenceParallelOutput{
        MeetingFunction::apply(std::move(meeting), at::TensorList(mine)), {}};
  };
}

Tensor MatchedContext::gather(const Tensor& x, const plan::StreamPlan& stream,
                              const std::string& site) const {
  if (stream.placement == plan::StreamPlacement::kReplicated) return x;
  auto meeting = c10::make_intrusive<Meeting>();
  meeting->lockstep = &lockstep_;
  meeting->chunk = chunk_;
  meeting->what = site;
  meeting->outputs = 1;
  meeting->forward = [](const std::vector<Values>& chunks) {
    std::vector<Tensor> rows;
    for (const Values& mine : chunks) rows.push_back(mine[0]);
    // A tensor of its own for each: graphs may change theirs.
    std::vector<Values> results;
    for (size_t c = 0; c < chunks.size(); ++c) results.push_back({at::cat(rows, 1)});
    return results;
  };
  meeting->backward = [stream,
                       convention = options().convention](const std::vector<Values>& cotangents) {
    return scatter(cotangents, stream, convention);
  };
  const std::vector<Tensor> own = {
      x.narrow(1, 0, stream.shards[static_cast<size_t>(chunk_)].size())};
  return MeetingFunction::apply(std::move(meeting), at::TensorList(own))[0];
}

}  // namespace shardproof::verify
