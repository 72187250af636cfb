#include "verify/mutants/fuzz_edits.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "verify/mutants/altered_context.h"
#include "verify/mutants/altered_local.h"

namespace shardproof::verify {
namespace {

using plan::AttentionPlan;
using PlanEdit = std::function<void(AttentionPlan&)>;

bool is_attention(const FuzzTarget& target) {
  return std::holds_alternative<AttentionSubject>(target.clean);
}

AnySubject with_plan(const FuzzTarget& target, const PlanEdit& edit) {
  const auto alter = [edit](AlteredContext& context, int) { context.edit_plan = edit; };
  if (std::holds_alternative<ModelSubject>(target.clean)) return in_context<ModelSubject>(alter);
  if (std::holds_alternative<TrainingSubject>(target.clean)) {
    return in_context<TrainingSubject>(alter);
  }
  AttentionSubject subject;
  subject.edit_plan = edit;
  return subject;
}

// A stream of the plan. Of models always the image, whose rows the output puts together again: text
// that other ranks hold in exchange is as right, the same sums in another order.
struct StreamChoice {
  bool image = false;
  int64_t number = 0;
  plan::StreamPlan& of(AttentionPlan& plan) const {
    for (plan::StreamPlan& stream : plan.streams) {
      if (image && stream.name == "image") return stream;
    }
    return plan.streams[static_cast<size_t>(number) % plan.streams.size()];
  }
  std::string text() const { return image ? "image" : std::to_string(number); }
};
StreamChoice draw_stream(const FuzzTarget& target, Draw& draw) {
  return {!is_attention(target), draw.between(0, 1)};
}

// Rank-major again, as the shards now are.
void follow_shards(AttentionPlan& plan) {
  for (auto& tokens : plan.block_tokens) tokens.clear();
  for (int r = 0; r < plan.sp(); ++r) {
    auto& block = plan.block_tokens[static_cast<size_t>(r / plan.mesh.ulysses)];
    for (size_t s = 0; s < plan.streams.size(); ++s) {
      const plan::Interval rows = plan.streams[s].shards[static_cast<size_t>(r)];
      for (int64_t t = rows.begin; t < rows.end; ++t) block.push_back(plan.stream_offset(s) + t);
    }
  }
}

struct RankPair {
  size_t a, b;
};
std::optional<RankPair> draw_pair(const FuzzTarget& target, Draw& draw) {
  const int64_t sp = target.mesh.sp();
  if (sp < 2) return {};
  const int64_t a = draw.between(0, sp - 1), other = draw.between(0, sp - 2);
  return RankPair{static_cast<size_t>(a), static_cast<size_t>(other < a ? other : other + 1)};
}

// Whether the two hold as many rows; else a plan that has them exchanged fits no tensor.
bool are_alike(const FuzzTarget& target, const StreamChoice& stream, RankPair ranks) {
  if (!is_attention(target)) return true;  // their cases are cut evenly
  AttentionPlan plan = AttentionCase::parse(target.case_id).make_plan();
  const auto& shards = stream.of(plan).shards;
  return shards[ranks.a].size() == shards[ranks.b].size();
}

// `whole`: all that reads the plan follows, masks too; else shards alone.
std::optional<Operation> swap_shards(const FuzzTarget& target, Draw& draw, bool whole) {
  const auto ranks = draw_pair(target, draw);
  if (!ranks) return {};
  const StreamChoice stream = draw_stream(target, draw);
  if (whole && !are_alike(target, stream, *ranks)) return {};
  const auto edit = [pair = *ranks, stream, whole](AttentionPlan& plan) {
    auto& shards = stream.of(plan).shards;
    std::swap(shards[pair.a], shards[pair.b]);
    if (whole) follow_shards(plan);
  };
  const char* name = whole ? "permute-shards" : "swap-intervals";
  return Operation{
      .name = name,
      .text = fmt::format("{},stream={},ranks={}+{}", name, stream.text(), ranks->a, ranks->b),
      .subject = with_plan(target, edit)};
}

// A bound of one rank's rows. Models cut their tensors by the plan, and refuse rows of another
// number loudly, which is no verdict: there both bounds move, into the stream.
std::optional<Operation> shift_bound(const FuzzTarget& target, Draw& draw) {
  if (target.mesh.sp() < 2) return {};
  const StreamChoice stream{false, draw.between(0, 1)};  // text that misses a token is wrong, too
  const auto rank = static_cast<size_t>(draw.between(0, target.mesh.sp() - 1));
  const int64_t by = draw.chance(2) ? 1 : -1;
  const bool at_end = draw.chance(2), both_ends = !is_attention(target);
  const auto edit = [=](AttentionPlan& plan) {
    plan::StreamPlan& whole = stream.of(plan);
    plan::Interval& rows = whole.shards[rank];
    if (both_ends) {
      const int64_t inward = rows.begin > 0 ? -1 : rows.end < whole.tokens ? 1 : 0;
      rows = {rows.begin + inward, rows.end + inward};
    } else {
      (at_end ? rows.end : rows.begin) += by;
    }
  };
  return Operation{
      .name = "off-by-one",
      .text = fmt::format(
          "off-by-one,stream={},rank={},{}", stream.text(), rank,
          both_ends ? "both ends" : fmt::format("{}={:+}", at_end ? "end" : "begin", by)),
      .subject = with_plan(target, edit)};
}

class ScaledLocal final : public AlteredLocal {
 public:
  ScaledLocal(AttentionSubject::Local inner, double factor)
      : AlteredLocal(std::move(inner)), factor_(factor) {}
  attention::AttentionGradients backward(const at::Tensor& dout, const at::Tensor& q,
                                         const at::Tensor& k, const at::Tensor& v,
                                         const at::Tensor& out, const at::Tensor& lse,
                                         const at::Tensor& mask, double scale) const override {
    const auto g = inner().backward(dout, q, k, v, out, lse, mask, scale);
    return {g.dq * factor_, g.dk * factor_, g.dv * factor_};
  }

 private:
  double factor_;
};

// A rank's share of a whole tensor, which is what checks judge in L2, is about 1/sqrt(ranks): what
// must be seen of the whole is that much more of the share.
double of_one_rank(const FuzzTarget& target, double factor) {
  const double change = (factor - 1) * std::sqrt(target.mesh.world());
  return 1 + std::clamp(change, -0.9, 0.9);
}

Operation scale_local(const FuzzTarget& target, Draw& draw, double factor) {
  const int64_t rank = draw.between(0, target.mesh.world() - 1);
  AttentionSubject subject;
  subject.wrap_local = [=](AttentionSubject::Local local, int at) -> AttentionSubject::Local {
    if (at != rank) return local;
    return std::make_shared<ScaledLocal>(std::move(local), factor);
  };
  return {.name = "scale-local",
          .text = fmt::format("scale-local,rank={},factor={:.17g}", rank, factor),
          .subject = subject};
}

Operation scale_loss(double factor) {
  TrainingSubject subject;
  subject.edit_loss = [=](const at::Tensor& loss, const TrainingSubject::LossPlace&) {
    return loss * factor;
  };
  return {.name = "scale-loss",
          .text = fmt::format("scale-loss,factor={:.17g}", factor),
          .subject = subject};
}

Operation scale_gradient(const FuzzTarget& target, Draw& draw, double factor) {
  const int64_t rank = draw.between(0, target.mesh.world() - 1), number = draw.between(0, 999);
  TrainingSubject subject;
  subject.edit_gradients = [=](const std::vector<fsdp::TrainedTensor>& tensors, int at) {
    if (at == rank) tensors[static_cast<size_t>(number) % tensors.size()].grad.mul_(factor);
  };
  return {
      .name = "scale-gradient",
      .text = fmt::format("scale-gradient,number={},rank={},factor={:.17g}", number, rank, factor),
      .subject = subject};
}

}  // namespace

std::optional<Operation> draw_scaling_edit(const FuzzTarget& target, Draw& draw, double factor,
                                           double on_one_rank) {
  if (is_attention(target)) return scale_local(target, draw, on_one_rank);
  if (!std::holds_alternative<TrainingSubject>(target.clean)) return {};
  return draw.chance(2) ? scale_loss(factor) : scale_gradient(target, draw, on_one_rank);
}

std::optional<Operation> draw_edit(const FuzzTarget& target, Draw& draw, double factor) {
  switch (draw.between(0, 4)) {
    case 0:
      return swap_shards(target, draw, /*whole=*/false);
    case 1:
      return swap_shards(target, draw, /*whole=*/true);
    case 2:
      return shift_bound(target, draw);
    default:
      return draw_scaling_edit(target, draw, factor, of_one_rank(target, factor));
  }
}

}  // namespace shardproof::verify
