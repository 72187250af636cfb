// L: which tokens and heads go where; how tensors lie in memory.
#include <ATen/ATen.h>

#include "verify/mutants/altered_context.h"
#include "verify/mutants/altered_local.h"
#include "verify/mutants/planting.h"

namespace shardproof::verify {
namespace {

using at::Tensor;
using attention::StreamQkv;

// [B,rows,...] taken for [rows,B,...], which is the same with one sample.
Tensor as_one_sample(const Tensor& x) { return x.transpose(0, 1).contiguous().view(x.sizes()); }

ModelSubject batch_ignored() {
  return in_context<ModelSubject>([](AlteredContext& context, int) {
    context.wrap_attention = [](const models::JointAttention& right) {
      return [right](std::vector<StreamQkv> streams, const Tensor& mask) {
        for (StreamQkv& s : streams) {
          s = {as_one_sample(s.q), as_one_sample(s.k), as_one_sample(s.v)};
        }
        return right(streams, mask);
      };
    };
  });
}

AttentionSubject with_plan(std::function<void(plan::AttentionPlan&)> edit) {
  AttentionSubject subject;
  subject.edit_plan = std::move(edit);
  return subject;
}

// As many heads for the first ranks as another model's count would give them; none for the last.
void first_ranks_take_all_heads(plan::AttentionPlan& p) {
  int64_t next = 0;
  const int64_t each = 2 * ((p.q_heads + p.mesh.ulysses - 1) / p.mesh.ulysses);
  for (plan::HeadShard& shard : p.heads) {
    const int64_t end = std::min(next + each, p.q_heads);
    shard = {{next, end}, {next, end}, {}};
    next = end;
  }
}

// Tokens that sp does not divide are dropped from the last stream.
void drop_tail(plan::AttentionPlan& p) {
  plan::StreamPlan& stream = p.streams.back();
  const int64_t each = stream.tokens / p.sp();
  for (size_t r = 0; r < stream.shards.size(); ++r) {
    const auto begin = static_cast<int64_t>(r) * each;
    stream.shards[r] = {begin, begin + each};
    stream.local_rows[r] = each;
  }
}

ModelSubject model_drops_tail() {
  return in_context<ModelSubject>([](AlteredContext& context, int) {
    context.edit_plan = drop_tail;
    // What has vanished is zero in the output.
    context.edit_gathered = [](const Tensor& whole, const Tensor&, const plan::StreamPlan& stream) {
      auto shape = whole.sizes().vec();
      shape[1] = stream.tokens - whole.size(1);
      return at::cat({whole, at::zeros(shape, whole.options())}, 1);
    };
  });
}

// Queries padded to a number of heads of their own: 3 to a KV head where 2 are right.
void wrong_group_of_heads(plan::AttentionPlan& p) {
  if (p.q_heads == p.kv_heads) return;
  for (plan::HeadShard& shard : p.heads) {
    shard.kv_of_q.clear();
    for (int64_t h = 0; h < shard.q.size(); ++h) {
      shard.kv_of_q.push_back(std::min(h / 3, shard.kv.size() - 1));
    }
  }
}

// dK, dV of a KV head that several ranks hold: only the first rank's share.
class FirstReplicaOnly final : public AlteredLocal {
 public:
  using AlteredLocal::AlteredLocal;
  attention::AttentionGradients backward(const Tensor& dout, const Tensor& q, const Tensor& k,
                                         const Tensor& v, const Tensor& out, const Tensor& lse,
                                         const Tensor& mask, double scale) const override {
    const auto g = inner().backward(dout, q, k, v, out, lse, mask, scale);
    return {g.dq, at::zeros_like(g.dk), at::zeros_like(g.dv)};
  }
};

AttentionSubject replicas_not_summed() {
  AttentionSubject subject;
  subject.wrap_local = [](AttentionSubject::Local local, int rank) -> AttentionSubject::Local {
    if (rank == 0) return local;
    return std::make_shared<FirstReplicaOnly>(std::move(local));
  };
  return subject;
}

// A tensor's memory read in the order of a dense one.
Tensor as_dense(const Tensor& x) {
  std::vector<int64_t> strides(static_cast<size_t>(x.dim()), 1);
  for (size_t d = strides.size() - 1; d > 0; --d) {
    strides[d - 1] = strides[d] * x.size(static_cast<int64_t>(d));
  }
  return x.as_strided(x.sizes(), strides, x.storage_offset());
}

AttentionSubject strides_ignored() {
  AttentionSubject subject;
  subject.edit_inputs = [](const StreamQkv& s, int) {
    return StreamQkv{as_dense(s.q), as_dense(s.k), as_dense(s.v)};
  };
  return subject;
}

// The second rank's rows begin one token late.
void off_by_one(plan::AttentionPlan& p) {
  plan::Interval& rows = p.streams.back().shards[1];
  rows = {rows.begin + 1, rows.end + 1};
}

}  // namespace

std::vector<Mutant> layout_mutants() {
  const AttentionSpot u2{"dp1.ring1.ulysses2"}, u4{"dp1.ring1.ulysses4"},
      strided{"dp1.ring1.ulysses2", "b2.t8.i24.h4.d16.strided"},
      grouped{"dp1.ring1.ulysses2", "b2.t8.i24.h8.kv4.d16"},
      one_kv{"dp1.ring1.ulysses2", "b2.t8.i24.h4.kv1.d16"},
      uneven{"dp1.ring1.ulysses2", "b2.t5.i15.h4.d16"};
  const ModelSpot model{"dp1.ring1.ulysses2"};
  ModelSpot one_sample = model;
  one_sample.batch = 1;
  const ModelSpot video = ModelSpot{"dp1.ring5.ulysses1", "wan"};
  return {
      {.id = "L1",
       .source = "deepspeedai/DeepSpeed#5664",
       .kind = "M-LAYOUT",
       .text = "messages of the all-to-all are put together in another order",
       .cause = "layout",
       .first_wrong = {"output"},
       .plants = plants(u4, with_faults<AttentionSubject>(
                                {fault(sim::FaultKind::kRotatePeers, "qkv.seq_to_head")}))},
      {.id = "L2",
       .source = "deepspeedai/DeepSpeed#5808",
       .kind = "M-LAYOUT",
       .text = "the layout of the all-to-all assumes one sample",
       .cause = "layout",
       .first_wrong = {"block.0.*"},
       .plants = plants(model, batch_ignored()),
       .innocent = {plant(one_sample, batch_ignored())}},
      {.id = "L4",
       .source = "deepspeedai/DeepSpeed#8316",
       .kind = "M-HEADSPLIT",
       .text = "heads are split by a count that another model has left behind",
       .cause = "ownership",
       .first_wrong = {"*"},
       .plants = plants(u4, with_plan(first_ranks_take_all_heads))},
      {.id = "L5",
       .source = "deepspeedai/DeepSpeed#7384",
       .kind = "M-DROPTAIL",
       .text = "a sequence that sp does not divide loses its tail",
       .cause = "ownership",
       .first_wrong = {"output"},
       .plants = plants(uneven, "tail-dropped"),
       .innocent = {plant(u2, with_plan([](plan::AttentionPlan& p) { drop_tail(p); }))}},
      {.id = "L6",
       .source = "ByteDance-Seed/VeOmni#1139",
       .kind = "M-DROPTAIL",
       .text = "the slice of a video's tokens is floor-divided: the last ones vanish",
       .cause = "ownership",
       .first_wrong = {"*"},
       .plants = plants(video, model_drops_tail()),
       .innocent = {plant(ModelSpot{"dp1.ring1.ulysses2", "wan"}, model_drops_tail())}},
      {.id = "L8",
       .source = "vllm-project/vllm-omni#5716",
       .kind = "M-GQARATIO",
       .text = "queries and KV heads are padded independently: another ratio",
       .cause = "ownership",
       .first_wrong = {"output"},
       .plants = plants(grouped, with_plan(wrong_group_of_heads)),
       .innocent = {plant(u2, with_plan(wrong_group_of_heads))}},
      {.id = "L9",
       .source = "hiyouga/LlamaFactory#10794",
       .kind = "M-GQAREPL",
       .text = "gradients of KV heads that several ranks hold are not summed over them",
       .cause = "backward",
       .first_wrong = {"k:grad"},
       .forward_right = true,
       .plants = plants(one_kv, replicas_not_summed())},
      {.id = "L10",
       .source = "pytorch/pytorch#141816",
       .kind = "M-STRIDE",
       .text = "strides of what is sent are ignored",
       .cause = "layout",
       .first_wrong = {"output"},
       .plants = plants(strided, strides_ignored()),
       .innocent = {plant(u2, strides_ignored())}},
      {.id = "L12",
       .source = "NVIDIA/Megatron-LM#5337",
       .kind = "M-STRIDE",
       .text = "an all-reduce works on a copy that is thrown away",
       .cause = "metric",
       .first_wrong = {"*/loss"},
       .plants =
           plants(TrainingSpot{"dp1.ring1.ulysses2.fsdp2"},
                  with_faults<TrainingSubject>({fault(sim::FaultKind::kLocal, "*loss.report*")}))},
      {.id = "L13",
       .source = "pytorch/pytorch#192920",
       .kind = "M-STRIDE",
       .text = "one backend ignores strides",
       .inexpressible =
           "a fault of one backend is seen by verify transports on that backend; on the "
           "data it is L10"},
      {.id = "L14",
       .source = "hao-ai-lab/FastVideo#1026",
       .kind = "M-STRIDE",
       .text = "a strided tensor goes into a collective that refuses it",
       .inexpressible = "a refusal at once: the simulator refuses strided tensors as NCCL does "
                        "(tests/sim/delivery_test.cc)"},
      {.id = "L16",
       .source = "modelscope/ms-swift#5740",
       .kind = "M-UNEVEN",
       .text = "two ways of splitting disagree about where a rank's tokens begin",
       .cause = "ownership",
       .first_wrong = {"*"},
       .plants = plants(u2, with_plan(off_by_one))},
  };
}

}  // namespace shardproof::verify
