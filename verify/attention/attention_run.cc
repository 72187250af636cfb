#include "verify/attention/attention_run.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <limits>

#include "base/error.h"
#include "verify/attention/expected_trace.h"
#include "verify/attention/ownership.h"
#include "verify/case.h"

namespace shardproof::verify {
namespace {

using at::Tensor;
using plan::GradientConvention;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

Tensor index_of(const std::vector<int64_t>& values) { return at::tensor(values, at::kLong); }

// One stream of one rank: which tokens it holds, in rows, and how many rows its tensors have.
struct StreamPart {
  std::string name;
  int64_t offset;  // of the stream in joint order
  Tensor tokens;   // of the stream, in row order; a replicated stream: all
  int64_t rows;    // pads included
  bool replicated;
  std::vector<int64_t> owned;  // tokens whose owner this rank is
};

std::vector<StreamPart> parts_of_rank(const AttentionCase& c, const Ownership& o, int sp_rank) {
  std::vector<StreamPart> parts;
  const auto add = [&](const char* name, int64_t offset, const std::vector<TokenHome>& homes,
                       int64_t rows, bool replicated) {
    std::vector<int64_t> held, owned;
    for (size_t t = 0; t < homes.size(); ++t) {
      const auto token = static_cast<int64_t>(t);
      if (homes[t].sp_rank == sp_rank) owned.push_back(token);
      if (replicated || homes[t].sp_rank == sp_rank) held.push_back(token);
    }
    parts.push_back({name, offset, index_of(held), rows, replicated, owned});
  };
  const auto r = static_cast<size_t>(sp_rank);
  const bool replicated = c.text_placement == plan::StreamPlacement::kReplicated;
  if (c.text > 0) add("text", 0, o.text, o.text_rows[r], replicated);
  if (c.image > 0) add("image", c.text, o.image, o.image_rows[r], false);
  return parts;
}

// The rank's rows of a whole tensor [B,S,H,D]; pad rows hold NaN.
Tensor take_rows(const Tensor& whole, const StreamPart& part) {
  Tensor rows = whole.index_select(1, part.tokens + part.offset);
  const int64_t pads = part.rows - rows.size(1);
  if (pads <= 0) return rows;
  const Tensor poison =
      at::full({whole.size(0), pads, whole.size(2), whole.size(3)}, kNaN, whole.options());
  return at::cat({rows, poison}, 1);
}

// A replicated stream's cotangent on one rank, so that the ranks' losses add up to the whole loss
// under the convention's rules. For kSumThenSlice the loss is rank-dependent: token t counts on
// rank t mod sp only.
Tensor replicated_cotangent(const AttentionCase& c, const Tensor& dout, int sp_rank) {
  if (c.convention == GradientConvention::kSliceThenScaleLoss) return dout;
  if (c.convention == GradientConvention::kSliceTimesSp) return dout / c.mesh.sp();
  const Tensor mine = at::arange(dout.size(1), at::kLong).remainder(c.mesh.sp()).eq(sp_rank);
  return dout.masked_fill(mine.logical_not().view({1, -1, 1, 1}), 0);
}

struct RankInputs {
  std::vector<attention::StreamQkv> streams;
  std::vector<Tensor> cotangents;
  Tensor mask;
};

attention::StreamQkv stream_inputs(const AttentionCase& c, const AttentionData& replica,
                                   const StreamPart& part, at::Device device) {
  Tensor q = take_rows(replica.q, part), k = take_rows(replica.k, part),
         v = take_rows(replica.v, part);
  if (c.strided && c.heads == c.kv_heads) {
    // [B,rows,3,H,D]; a copy of a view to a device would be dense.
    const Tensor packed = at::stack({q, k, v}, 2).to(device);
    q = packed.select(2, 0), k = packed.select(2, 1), v = packed.select(2, 2);
  }
  const auto leaf = [&](const Tensor& x) { return x.to(device).detach().requires_grad_(true); };
  return {leaf(q), leaf(k), leaf(v)};
}

AttentionData replica_data(const AttentionCase& c, const AttentionData& data, int dp) {
  const auto samples = [&](const Tensor& x) {
    return x.defined() ? x.narrow(0, dp * c.batch, c.batch) : x;
  };
  AttentionData replica;
  replica.mask = samples(data.mask);
  replica.q = samples(data.q), replica.dout = samples(data.dout);
  replica.k = samples(data.k), replica.v = samples(data.v);
  if (replica.mask.defined()) {
    const Tensor hidden = replica.mask.logical_not().unsqueeze(-1).unsqueeze(-1);
    replica.k = replica.k.masked_fill(hidden, kNaN);
    replica.v = replica.v.masked_fill(hidden, kNaN);
  }
  return replica;
}

RankInputs rank_inputs(const AttentionCase& c, const AttentionData& data,
                       const std::vector<StreamPart>& parts, int dp, int sp_rank,
                       at::Device device) {
  const AttentionData replica = replica_data(c, data, dp);
  RankInputs inputs;
  for (const StreamPart& part : parts) {
    inputs.streams.push_back(stream_inputs(c, replica, part, device));
    Tensor cotangent = take_rows(replica.dout, part);
    if (part.replicated) cotangent = replicated_cotangent(c, cotangent, sp_rank);
    inputs.cotangents.push_back(cotangent.to(device));
  }
  if (replica.mask.defined()) inputs.mask = replica.mask.to(device);
  return inputs;
}

RankResult run_rank(const AttentionCase& c, const AttentionData& data,
                    const AttentionSubject& subject, const std::vector<StreamPart>& parts,
                    comm::BackendFactory& rank) {
  const comm::Mesh mesh(rank, c.mesh);
  plan::AttentionPlan plan = c.make_plan();
  if (subject.edit_plan) subject.edit_plan(plan);
  AttentionSubject::Local local =
      attention::make_local_attention(c.backend, rank.device(), c.dtype, data.mask.defined());
  if (subject.wrap_local) local = subject.wrap_local(local, rank.rank());
  const attention::SequenceParallelAttention attend(plan, mesh, local, subject.merge);

  const RankInputs inputs =
      rank_inputs(c, data, parts, mesh.at().dp, mesh.sp_rank(), rank.device());
  std::vector<attention::StreamQkv> given = inputs.streams;
  for (attention::StreamQkv& stream : given) {
    if (subject.edit_inputs) stream = subject.edit_inputs(stream, rank.rank());
  }
  const auto result = attend(given, inputs.mask, data.scale);
  std::vector<Tensor> leaves;
  for (const auto& s : inputs.streams) leaves.insert(leaves.end(), {s.q, s.k, s.v});
  const auto grads = torch::autograd::grad(result.streams, leaves, inputs.cotangents);

  RankResult outputs;
  for (size_t s = 0; s < result.streams.size(); ++s) {
    outputs[fmt::format("{}.out", s)] = result.streams[s].detach().cpu();
    const char* const names[] = {"dq", "dk", "dv"};
    for (size_t i = 0; i < 3; ++i) {
      outputs[fmt::format("{}.{}", s, names[i])] = grads[3 * s + i].cpu();
    }
  }
  outputs["lse"] = result.lse.detach().cpu();
  return outputs;
}

// Puts the ranks' results together into whole tensors, and looks at what must be zero or equal.
class Assembly {
 public:
  Assembly(const AttentionCase& c, const AttentionData& data, const Ownership& ownership)
      : c_(c), ownership_(ownership) {
    const auto empty = [](const Tensor& like, at::ScalarType type) {
      return at::full(like.sizes(), kNaN, like.options().dtype(type));
    };
    tensors_.out = empty(data.q, c.dtype);
    tensors_.dq = empty(data.q, at::kDouble);
    tensors_.dk = empty(data.k, at::kDouble);
    tensors_.dv = empty(data.v, at::kDouble);
    tensors_.lse = at::full({data.q.size(0), c.heads, c.tokens()}, kNaN,
                            at::TensorOptions(attention::accumulate_type(c.dtype)));
  }

  void add(int world_rank, const RankResult& outputs, const std::vector<StreamPart>& parts) {
    const comm::MeshCoordinates at = comm::coordinates(c_.mesh, world_rank);
    const int sp_rank = world_rank % c_.mesh.sp();
    for (size_t s = 0; s < parts.size(); ++s) {
      const auto get = [&](const char* name) { return outputs.at(fmt::format("{}.{}", s, name)); };
      const bool partial = parts[s].replicated;
      place(tensors_.out, get("out"), parts[s], at.dp, sp_rank, /*partial=*/false);
      place(tensors_.dq, get("dq"), parts[s], at.dp, sp_rank, partial);
      place(tensors_.dk, get("dk"), parts[s], at.dp, sp_rank, partial);
      place(tensors_.dv, get("dv"), parts[s], at.dp, sp_rank, partial);
    }
    place_lse(outputs.at("lse"), at);
  }

  AttentionTensors finish() {
    const auto narrow = [&](const Tensor& x) { return x.to(c_.dtype); };
    if (c_.text_placement == plan::StreamPlacement::kSharded) {
      tensors_.dq = narrow(tensors_.dq);
      tensors_.dk = narrow(tensors_.dk);
      tensors_.dv = narrow(tensors_.dv);
    }
    return tensors_;
  }
  const std::string& problem() const { return problem_; }

 private:
  void complain(const std::string& what) {
    if (problem_.empty()) problem_ = what;
  }

  // `partial`: the ranks' values are summed; else a replicated output must be alike on all ranks.
  void place(Tensor& whole, const Tensor& local, const StreamPart& part, int dp, int sp_rank,
             bool partial) {
    const Tensor target = whole.narrow(0, dp * c_.batch, c_.batch);
    const int64_t real = part.tokens.size(0);
    const Tensor rows = local.narrow(1, 0, real).to(whole.scalar_type());
    const Tensor pads = local.narrow(1, real, local.size(1) - real);
    if (pads.numel() > 0 && !pads.eq(0).all().item<bool>()) {
      complain(fmt::format("rank {}: pad rows of stream '{}' are not zero",
                           dp * c_.mesh.sp() + sp_rank, part.name));
    }
    const Tensor tokens = part.tokens + part.offset;
    if (part.replicated && sp_rank > 0) {
      const Tensor before = target.index_select(1, tokens);
      if (partial) {
        target.index_copy_(1, tokens, before + rows);
        return;
      }
      if (!at::equal(before, rows)) {
        complain(fmt::format("rank {}: the replicated output of stream '{}' differs from rank {}'s",
                             dp * c_.mesh.sp() + sp_rank, part.name, dp * c_.mesh.sp()));
      }
      return;
    }
    target.index_copy_(1, tokens, rows);
  }

  void place_lse(const Tensor& local, comm::MeshCoordinates at) {
    const auto& tokens = ownership_.block_tokens[static_cast<size_t>(at.ring)];
    const auto& heads = ownership_.heads[static_cast<size_t>(at.ulysses)];
    const std::vector<int64_t> expected = {c_.batch,
                                           ownership_.head_slots[static_cast<size_t>(at.ulysses)],
                                           static_cast<int64_t>(tokens.size())};
    if (local.sizes() != expected) {
      complain(fmt::format("log-sum-exp of shape {}; expected {}", c10::str(local.sizes()),
                           c10::str(at::IntArrayRef(expected))));
      return;
    }
    const Tensor target = tensors_.lse.narrow(0, at.dp * c_.batch, c_.batch);
    for (size_t i = 0; i < heads.size(); ++i) {
      target.select(1, heads[i])
          .index_copy_(1, index_of(tokens), local.select(1, static_cast<int64_t>(i)));
    }
  }

  const AttentionCase& c_;
  const Ownership& ownership_;
  AttentionTensors tensors_;
  std::string problem_;
};

}  // namespace

AttentionTensors run_whole(const AttentionCase& c, const AttentionData& data, at::Device device) {
  const at::NoGradGuard no_grad;
  std::vector<int64_t> order;
  for (const auto& block : derive_ownership(c).block_tokens) {
    order.insert(order.end(), block.begin(), block.end());
  }
  const bool sorted = std::is_sorted(order.begin(), order.end());
  const Tensor index = index_of(order);
  const auto turn = [&](const Tensor& x) {
    return (sorted ? x : x.index_select(1, index)).to(device);
  };
  const auto back = [&](const Tensor& x, int64_t dim) {
    const Tensor host = x.cpu();
    return sorted ? host : at::empty_like(host).index_copy_(dim, index, host);
  };
  const Tensor mask = data.mask.defined() ? turn(data.mask) : Tensor();
  const Tensor q = turn(data.q), k = turn(data.k), v = turn(data.v);
  const auto local = attention::make_local_attention(c.backend, device, c.dtype, mask.defined());
  const auto forward = local->forward(q, k, v, mask, data.scale);
  const auto grads =
      local->backward(turn(data.dout), q, k, v, forward.out, forward.lse, mask, data.scale);
  return {back(forward.out, 1), back(forward.lse, 2), back(grads.dq, 1), back(grads.dk, 1),
          back(grads.dv, 1)};
}

SequenceParallelRun run_sequence_parallel(const AttentionCase& c, const AttentionData& data,
                                          const AttentionSubject& subject, RankWorld& world) {
  SP_CHECK(world.size() == c.mesh.world(), "world of {} for {}", world.size(), c.id());
  const Ownership ownership = derive_ownership(c);
  std::vector<std::vector<StreamPart>> parts;
  for (int r = 0; r < c.mesh.sp(); ++r) parts.push_back(parts_of_rank(c, ownership, r));

  SequenceParallelRun run;
  plan::AttentionPlan plan = c.make_plan();
  if (subject.edit_plan) subject.edit_plan(plan);
  const std::vector<std::string> problems = plan::audit(plan);
  run.checks.push_back({"coverage", problems.empty() ? Status::kPass : Status::kFail,
                        problems.empty() ? std::string() : "plan: " + problems[0]});

  std::vector<RankResult> outputs;
  const auto program = [&](comm::BackendFactory& rank) {
    const auto& mine = parts[static_cast<size_t>(rank.rank() % c.mesh.sp())];
    return run_rank(c, data, subject, mine, rank);
  };
  try {
    run.completed = run_ranks(world, subject.faults, program, outputs, run.checks);
  } catch (const sim::CollectiveError&) {
    // Ranks cannot work by every wrong plan. That it is wrong is the finding, not where they fail.
    if (problems.empty()) throw;
    run.completed = false;
  }
  if (!run.completed) return run;
  Assembly assembly(c, data, ownership);
  for (int r = 0; r < world.size(); ++r) {
    assembly.add(r, outputs[static_cast<size_t>(r)], parts[static_cast<size_t>(r % c.mesh.sp())]);
  }
  run.tensors = assembly.finish();
  if (!assembly.problem().empty()) {
    run.checks.push_back({"coverage", Status::kFail, assembly.problem()});
  }
  run.checks.push_back(check_trace(c, ownership, world));
  for (CheckResult& finding : world.findings()) run.checks.push_back(std::move(finding));
  return run;
}

}  // namespace shardproof::verify
