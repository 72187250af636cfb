#include "models/parallel.h"

#include <ATen/ATen.h>

#include "base/error.h"
#include "comm/differentiable.h"

namespace shardproof::models {
namespace {

using at::Tensor;
using plan::GradientConvention;
using plan::StreamPlacement;
using plan::TensorRule;
using plan::TensorUse;

comm::GatherAdjoint adjoint_of(GradientConvention convention) {
  switch (convention) {
    case GradientConvention::kSliceThenScaleLoss:
      return comm::GatherAdjoint::kOwnSlice;
    case GradientConvention::kSliceTimesSp:
      return comm::GatherAdjoint::kOwnSliceTimes;
    case GradientConvention::kSumThenSlice:
      break;
  }
  return comm::GatherAdjoint::kSum;
}

}  // namespace

plan::AttentionPlan plan_attention(const comm::MeshShape& mesh, const ParallelOptions& split,
                                   const std::vector<std::pair<std::string, int64_t>>& streams,
                                   int64_t heads) {
  plan::AttentionPlanOptions options;
  options.mesh = mesh;
  options.q_heads = options.kv_heads = heads;
  for (const auto& [name, tokens] : streams) {
    options.streams.push_back(
        {name, tokens, name == "text" ? split.text_placement : StreamPlacement::kSharded});
  }
  options.token_split = split.token_split;
  options.head_split = split.head_split;
  options.ring_mode = split.ring_mode;
  return plan::make_attention_plan(options);
}

Tensor MeshContext::own_rows(const Tensor& x, const plan::StreamPlan& stream, int64_t dim) const {
  if (stream.placement == StreamPlacement::kReplicated) return x;
  const auto rank = static_cast<size_t>(mesh_.sp_rank());
  Tensor rows = x.narrow(dim, stream.shards[rank].begin, stream.shards[rank].size());
  const int64_t pads = stream.local_rows[rank] - stream.shards[rank].size();
  if (pads == 0) return rows;
  auto shape = x.sizes().vec();
  shape[static_cast<size_t>(dim)] = pads;
  return at::cat({rows, at::zeros(shape, x.options())}, dim);
}

JointAttention MeshContext::attention(plan::AttentionPlan plan, at::ScalarType dtype,
                                      bool masked) const {
  return attention::SequenceParallelAttention(
      std::move(plan), mesh_,
      attention::make_local_attention(options().backend, device(), dtype, masked));
}

Tensor MeshContext::gather(const Tensor& x, const plan::StreamPlan& stream,
                           const std::string& site) const {
  if (stream.placement == StreamPlacement::kReplicated) return x;
  std::vector<int64_t> rows;
  for (const plan::Interval& shard : stream.shards) rows.push_back(shard.size());
  const Tensor own = x.narrow(1, 0, rows[static_cast<size_t>(mesh_.sp_rank())]);
  return comm::gather_rows(own, mesh_.sp(), rows, adjoint_of(options().convention), site);
}

const TensorRule& Sharding::use(const std::string& tensor, TensorUse use) {
  const TensorRule* rule = plan::find_rule(rules_, tensor);
  SP_CHECK(rule != nullptr && rule->use == use, "the model's plan has no such rule for '{}'",
           tensor);
  done_.insert(tensor);
  return *rule;
}

const plan::StreamPlan& Sharding::stream(const TensorRule& rule) const {
  for (const plan::StreamPlan& stream : attention_.streams) {
    if (stream.name == rule.stream) return stream;
  }
  internal_error("the attention plan has no stream '{}'", rule.stream);
}

Tensor Sharding::split(const std::string& tensor, const Tensor& x) {
  const TensorRule& rule = use(tensor, TensorUse::kSplit);
  const plan::StreamPlan& plan = stream(rule);
  if (x.dim() != rule.dims || x.size(rule.dim) != plan.tokens) {
    bad_input(
        "{}: expected {} dimensions with the {} tokens of stream '{}' along dimension {}; got "
        "shape {}",
        tensor, rule.dims, plan.tokens, plan.name, rule.dim, c10::str(x.sizes()));
  }
  return parallel_.own_rows(x, plan, rule.dim);
}

RopeTable Sharding::split(const std::string& tensor, const RopeTable& table) {
  return {split(tensor, table.cos), split(tensor, table.sin)};
}

Tensor Sharding::gather(const std::string& tensor, const Tensor& x) {
  return parallel_.gather(x, stream(use(tensor, TensorUse::kGather)), tensor + ".gather");
}

void Sharding::finish() const {
  for (const TensorRule& rule : rules_) {
    if (rule.use == TensorUse::kWhole || rule.optional) continue;
    SP_CHECK(done_.contains(rule.tensor), "the model did not carry out its plan for '{}'",
             rule.tensor);
  }
}

}  // namespace shardproof::models
