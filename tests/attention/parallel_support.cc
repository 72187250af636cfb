#include "tests/attention/parallel_support.h"

#include <torch/csrc/autograd/autograd.h>

#include <cmath>

#include "comm/mesh.h"

namespace shardproof::tests {

using at::Tensor;
using attention::StreamQkv;

const std::vector<Mode>& modes() {
  using plan::RingMode;
  static const std::vector<Mode> all = {
      {"local", {1, 1, 1}, RingMode::kRotate},
      {"ulysses", {1, 1, 3}, RingMode::kRotate},
      {"ring", {1, 3, 1}, RingMode::kRotate},
      {"allgather", {1, 3, 1}, RingMode::kAllGather},
      {"hybrid", {1, 2, 2}, RingMode::kRotate},
      {"hybrid_allgather", {1, 2, 2}, RingMode::kAllGather},
  };
  return all;
}

plan::AttentionPlan joint_plan(const Mode& mode, const JointOptions& o) {
  plan::AttentionPlanOptions options;
  options.mesh = mode.mesh;
  options.ring_mode = mode.ring_mode;
  options.q_heads = o.heads, options.kv_heads = o.kv_heads;
  if (o.text > 0) options.streams.push_back({"text", o.text, o.text_placement});
  options.streams.push_back({"image", o.image});
  options.token_split = o.token_split;
  options.head_split = plan::HeadSplit::kUneven;
  options.convention = o.convention;
  return plan::make_attention_plan(options);
}

Problem draw_joint(uint64_t seed, const plan::AttentionPlan& plan, int64_t batch,
                   at::ScalarType dtype, int64_t dim) {
  Draw draw(seed);
  const auto normal = [&](int64_t heads) {
    return draw.normal({batch, plan.joint_tokens(), heads, dim}, dtype);
  };
  Problem p{normal(plan.q_heads),
            normal(plan.kv_heads),
            normal(plan.kv_heads),
            normal(plan.q_heads),
            {},
            1 / std::sqrt(static_cast<double>(dim))};
  return p;
}

namespace {
bool is_replicated(const plan::AttentionPlan& plan, size_t stream) {
  return plan.streams[stream].placement == plan::StreamPlacement::kReplicated;
}
}  // namespace

Tensor local_rows(const plan::AttentionPlan& plan, const Tensor& joint, size_t stream, int sp_rank,
                  double pad) {
  const plan::StreamPlan& s = plan.streams[stream];
  const Tensor whole = joint.narrow(1, plan.stream_offset(stream), s.tokens);
  if (is_replicated(plan, stream)) return whole;
  const auto r = static_cast<size_t>(sp_rank);
  const Tensor rows = whole.narrow(1, s.shards[r].begin, s.shards[r].size());
  auto shape = rows.sizes().vec();
  shape[1] = s.local_rows[r] - rows.size(1);
  return at::cat({rows, at::full(shape, pad, rows.options())}, 1);
}

std::vector<StreamQkv> local_inputs(const plan::AttentionPlan& plan, const Problem& p,
                                    int sp_rank) {
  std::vector<StreamQkv> streams;
  for (size_t s = 0; s < plan.streams.size(); ++s) {
    const auto leaf = [&](const Tensor& x) {
      return local_rows(plan, x, s, sp_rank).clone().requires_grad_(true);
    };
    streams.push_back({leaf(p.q), leaf(p.k), leaf(p.v)});
  }
  return streams;
}

Tensors local_cotangents(const plan::AttentionPlan& plan, const Problem& p, int sp_rank) {
  Tensors cotangents;
  for (size_t s = 0; s < plan.streams.size(); ++s) {
    cotangents.push_back(local_rows(plan, p.dout, s, sp_rank));
  }
  return cotangents;
}

Tensor joined(const plan::AttentionPlan& plan, const std::vector<Tensors>& by_rank,
              Replicas replicas) {
  Tensors streams;
  for (size_t s = 0; s < plan.streams.size(); ++s) {
    if (is_replicated(plan, s)) {
      Tensor sum = by_rank[0][s];
      for (size_t r = 1; r < by_rank.size() && replicas == Replicas::kSum; ++r) {
        sum = sum + by_rank[r][s];
      }
      streams.push_back(sum);
      continue;
    }
    for (size_t r = 0; r < by_rank.size(); ++r) {
      streams.push_back(by_rank[r][s].narrow(1, 0, plan.streams[s].shards[r].size()));
    }
  }
  return at::cat(streams, 1);
}

attention::SequenceParallelAttention make_attention(const plan::AttentionPlan& plan,
                                                    const comm::Mesh& mesh, at::ScalarType dtype,
                                                    const char* backend) {
  return {plan, mesh, attention::make_local_attention(backend, at::kCPU, dtype, true)};
}

JointResult gather_results(const plan::AttentionPlan& plan, std::vector<Tensors> outs,
                           std::vector<Tensors> grads) {
  JointResult result;
  result.out = joined(plan, outs, Replicas::kFirst);
  const auto part = [&](size_t which) {
    std::vector<Tensors> by_rank;
    for (const Tensors& rank : grads) {
      Tensors streams;
      for (size_t i = which; i < rank.size(); i += 3) streams.push_back(rank[i]);
      by_rank.push_back(streams);
    }
    return joined(plan, by_rank, Replicas::kSum);
  };
  result.dq = part(0), result.dk = part(1), result.dv = part(2);
  result.outs = std::move(outs), result.grads = std::move(grads);
  return result;
}

JointResult run_joint(const plan::AttentionPlan& plan, const Problem& p) {
  sim::World world(plan.sp());
  std::vector<Tensors> outs(static_cast<size_t>(plan.sp()));
  std::vector<Tensors> grads = on_ranks(world, [&](sim::RankContext& rank) {
    const comm::Mesh mesh(rank, plan.mesh);
    const auto attend = make_attention(plan, mesh, p.q.scalar_type());
    const std::vector<StreamQkv> inputs = local_inputs(plan, p, rank.rank());
    const auto result = attend(inputs, p.mask, p.scale);
    for (const Tensor& out : result.streams) {
      outs[static_cast<size_t>(rank.rank())].push_back(out.detach());
    }
    Tensors leaves;
    for (const StreamQkv& s : inputs) leaves.insert(leaves.end(), {s.q, s.k, s.v});
    return torch::autograd::grad(result.streams, leaves, local_cotangents(plan, p, rank.rank()));
  });
  return gather_results(plan, std::move(outs), std::move(grads));
}

void check_joint(const JointResult& result, const Solution& whole, double limit) {
  CHECK(error(result.out, whole.out, whole.out_abs) <= limit);
  CHECK(error(result.dq, whole.dq, whole.dq_abs) <= limit);
  CHECK(error(result.dk, whole.dk, whole.dk_abs) <= limit);
  CHECK(error(result.dv, whole.dv, whole.dv_abs) <= limit);
}

}  // namespace shardproof::tests
