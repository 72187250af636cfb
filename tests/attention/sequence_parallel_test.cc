// Joint attention over a mesh of ranks: results, refusals, poison, gradient conventions, tags.
#include "attention/sequence_parallel.h"

#include "tests/catch.h"

#include <torch/csrc/autograd/autograd.h>

#include <functional>

#include "comm/mesh.h"
#include "comm/tag.h"
#include "tests/attention/parallel_support.h"
#include "tests/file_support.h"

namespace shardproof::attention {
namespace {

using at::Tensor;
using plan::GradientConvention;
using plan::StreamPlacement;
using tests::all_zero;
using tests::contains;
using tests::error;
using tests::JointOptions;
using tests::JointResult;
using tests::Mode;
using tests::modes;
using tests::on_ranks;
using tests::Problem;
using tests::Replicas;
using tests::Tensors;

Mode mode_called(std::string_view name) {
  for (const Mode& mode : modes()) {
    if (mode.name == name) return mode;
  }
  FAIL("no mode " << name);
  return {};
}

TEST_CASE("sequence parallel: every mode equals whole attention", "[attention][sp]") {
  for (const Mode& mode : modes()) {
    for (const StreamPlacement text : {StreamPlacement::kSharded, StreamPlacement::kReplicated}) {
      for (const int64_t kv_heads : {int64_t{6}, int64_t{2}}) {
        JointOptions options;
        options.text_placement = text;
        options.heads = 6, options.kv_heads = kv_heads;
        // A cotangent on every rank: convention A takes each rank's own slice of it.
        options.convention = GradientConvention::kSliceThenScaleLoss;
        const plan::AttentionPlan plan = tests::joint_plan(mode, options);
        const Problem p = tests::draw_joint(1, plan);
        INFO(mode.name << (text == StreamPlacement::kSharded ? "" : ", text replicated") << ", "
                       << kv_heads << " KV heads");
        tests::check_joint(tests::run_joint(plan, p), tests::solve(p));
      }
    }
  }
}

TEST_CASE("sequence parallel: streams without tokens and empty batches", "[attention][sp]") {
  for (const Mode& mode : modes()) {
    for (const StreamPlacement text : {StreamPlacement::kSharded, StreamPlacement::kReplicated}) {
      for (const auto& [batch, image] : {std::pair(2, 5), std::pair(0, 13), std::pair(2, 0)}) {
        plan::AttentionPlanOptions options;
        options.mesh = mode.mesh, options.ring_mode = mode.ring_mode;
        options.q_heads = options.kv_heads = 4;
        options.head_split = plan::HeadSplit::kUneven;
        options.streams = {{"text", image == 0 ? 3 : 0, text}, {"image", image}};
        options.convention = GradientConvention::kSliceThenScaleLoss;
        const plan::AttentionPlan plan = plan::make_attention_plan(options);
        Problem p = tests::draw_joint(15, plan, batch);
        for (const bool masked : {false, true}) {
          if (masked) p.mask = tests::Draw(16).mask(batch, plan.joint_tokens(), 0.5);
          INFO(mode.name << ", batch " << batch << ", image " << image << ", masked " << masked);
          tests::check_joint(tests::run_joint(plan, p), tests::solve(p));
        }
      }
    }
  }
}

// What sum().backward() hands down has no strides, and q, k, v are views of one projection.
TEST_CASE("sequence parallel: inputs and cotangents of any strides", "[attention][sp]") {
  for (const Mode& mode : modes()) {
    for (const int64_t text : {0, 7}) {
      JointOptions options;
      options.text = text;
      const plan::AttentionPlan plan = tests::joint_plan(mode, options);
      Problem p = tests::draw_joint(17, plan);
      p.dout = at::ones_like(p.dout);
      sim::World world(plan.sp());
      std::vector<Tensors> outs(static_cast<size_t>(plan.sp()));
      std::vector<Tensors> grads = on_ranks(world, [&](sim::RankContext& rank) {
        const comm::Mesh mesh(rank, plan.mesh);
        Tensors packed;
        std::vector<StreamQkv> inputs;
        for (const StreamQkv& s : tests::local_inputs(plan, p, rank.rank())) {
          packed.push_back(at::stack({s.q, s.k, s.v}, 3).detach().requires_grad_(true));
          inputs.push_back(
              {packed.back().select(3, 0), packed.back().select(3, 1), packed.back().select(3, 2)});
        }
        const auto result = tests::make_attention(plan, mesh)(inputs);
        Tensor sum = at::zeros({}, at::kDouble);
        for (const Tensor& out : result.streams) {
          outs[static_cast<size_t>(rank.rank())].push_back(out.detach());
          sum = sum + out.sum();
        }
        Tensors unpacked;
        for (const Tensor& g : torch::autograd::grad({sum}, packed)) {
          for (int64_t i = 0; i < 3; ++i) unpacked.push_back(g.select(3, i));
        }
        return unpacked;
      });
      INFO(mode.name << ", " << text << " text tokens");
      tests::check_joint(tests::gather_results(plan, std::move(outs), std::move(grads)),
                         tests::solve(p));
    }
  }
}

// ---- refusals

struct Arguments {
  std::vector<StreamQkv> streams;
  Tensor mask;
};

// The message when rank 1 of 2 passes damaged arguments. Its shard: 3 of 7 text, 6 of 13 image
// tokens, batch 2, 5 heads, 8 channels, Double.
std::string refusal(const std::function<void(Arguments&)>& damage) {
  const Mode mode{"ulysses", {1, 1, 2}, plan::RingMode::kRotate};
  JointOptions options;
  options.kv_heads = 1;
  const plan::AttentionPlan plan = tests::joint_plan(mode, options);
  const Problem p = tests::draw_joint(2, plan);
  sim::World world(2);
  return tests::error_text([&] {
    world.run([&](sim::RankContext& rank) {
      const comm::Mesh mesh(rank, plan.mesh);
      Arguments a{tests::local_inputs(plan, p, rank.rank()), at::ones({2, 20}, at::kBool)};
      if (rank.rank() == 1) damage(a);
      tests::make_attention(plan, mesh)(a.streams, a.mask);
    });
  });
}

void check_refusal(const char* what, const std::function<void(Arguments&)>& damage,
                   const std::vector<const char*>& words) {
  const std::string text = refusal(damage);
  INFO(what << ": " << text);
  for (const char* word : words) {
    INFO(word);
    CHECK(contains(text, word));
  }
}

TEST_CASE("sequence parallel: tensors that do not fit the plan are refused", "[attention][sp]") {
  check_refusal(
      "rows", [](Arguments& a) { a.streams[1].q = a.streams[1].q.narrow(1, 0, 5); },
      {"'image'", "q on SP rank 1", "expected Double [2, 6, 5, 8]", "got Double [2, 5, 5, 8]"});
  check_refusal(
      "rows of rank 0",
      [](Arguments& a) {
        a.streams[0].v = at::ones({2, 4, 1, 8}, at::kDouble);
      },
      {"'text'", "v on SP rank 1", "expected Double [2, 3, 1, 8]", "got Double [2, 4, 1, 8]"});
  check_refusal(
      "heads", [](Arguments& a) { a.streams[0].k = a.streams[0].q; },
      {"'text'", "k on SP rank 1", "expected Double [2, 3, 1, 8]", "got Double [2, 3, 5, 8]"});
  check_refusal(
      "channels", [](Arguments& a) { a.streams[1].v = a.streams[1].v.narrow(3, 0, 4); },
      {"'image'", "v on SP rank 1", "expected Double [2, 6, 1, 8]", "got Double [2, 6, 1, 4]"});
  check_refusal(
      "batch", [](Arguments& a) { a.streams[1].k = a.streams[1].k.narrow(0, 0, 1); },
      {"'image'", "k on SP rank 1", "expected Double [2, 6, 1, 8]", "got Double [1, 6, 1, 8]"});
  check_refusal(
      "dimensions", [](Arguments& a) { a.streams[1].q = a.streams[1].q.flatten(2); },
      {"'image'", "q on SP rank 1", "expected Double [2, 6, 5, 8]", "got Double [2, 6, 40]"});
  check_refusal(
      "dtype", [](Arguments& a) { a.streams[1].v = a.streams[1].v.to(at::kFloat); },
      {"'image'", "v on SP rank 1", "expected Double [2, 6, 1, 8]", "got Float [2, 6, 1, 8]"});
  check_refusal("device", [](Arguments& a) { a.streams[0].k = a.streams[0].k.to(at::kMeta); },
                {"'text'", "k on SP rank 1", "on cpu, got", "on meta"});
}

// The first tensor is the one whose batch, channels, dtype and device the others are held to.
TEST_CASE("sequence parallel: a first tensor that is none is refused", "[attention][sp]") {
  check_refusal("no dimensions", [](Arguments& a) { a.streams[0].q = at::ones({}, at::kDouble); },
                {"'text'", "q on SP rank 1", "got Double []"});
  check_refusal("one dimension", [](Arguments& a) { a.streams[0].q = at::ones({2}, at::kDouble); },
                {"'text'", "q on SP rank 1", "got Double [2]"});
  check_refusal("undefined", [](Arguments& a) { a.streams[0].q = Tensor(); },
                {"'text'", "q on SP rank 1", "got an undefined tensor"});
  check_refusal("undefined value", [](Arguments& a) { a.streams[1].v = Tensor(); },
                {"'image'", "v on SP rank 1", "got an undefined tensor"});
}

TEST_CASE("sequence parallel: streams and masks that do not fit are refused", "[attention][sp]") {
  check_refusal("a stream too few", [](Arguments& a) { a.streams.pop_back(); },
                {"got 1 streams", "the plan has 2"});
  check_refusal("no stream", [](Arguments& a) { a.streams.clear(); },
                {"got 0 streams", "the plan has 2"});
  check_refusal("local mask", [](Arguments& a) { a.mask = a.mask.narrow(1, 0, 9); },
                {"key mask", "expected Bool [2, 20]", "got Bool [2, 9]"});
  check_refusal("batch of the mask", [](Arguments& a) { a.mask = a.mask[0]; },
                {"key mask", "expected Bool [2, 20]", "got Bool [20]"});
  check_refusal("additive mask",
                [](Arguments& a) {
                  a.mask = at::zeros({2, 20});
                },
                {"key mask", "expected Bool [2, 20]", "got Float [2, 20]"});
  check_refusal("mask elsewhere", [](Arguments& a) { a.mask = a.mask.to(at::kMeta); },
                {"key mask", "on cpu", "on meta"});
}

TEST_CASE("sequence parallel: a plan for another mesh is refused", "[attention][sp]") {
  const plan::AttentionPlan plan = tests::joint_plan({"ring", {1, 2, 1}, plan::RingMode::kRotate});
  sim::World world(4);
  const std::string text = tests::error_text(
      [&] {
        world.run([&](sim::RankContext& rank) {
          const comm::Mesh mesh(rank, {1, 4, 1});
          tests::make_attention(plan, mesh);
        });
      },
      ErrorKind::kInternal);
  CHECK(contains(text, "dp1.ring2.ulysses1"));
  CHECK(contains(text, "dp1.ring4.ulysses1"));
}

// ---- poison

TEST_CASE("sequence parallel: NaN in pads and masked keys reaches no result", "[attention][sp]") {
  for (const Mode& mode : modes()) {
    for (const StreamPlacement text : {StreamPlacement::kSharded, StreamPlacement::kReplicated}) {
      JointOptions options;
      options.token_split = plan::TokenSplit::kPadded;
      options.text_placement = text;
      options.convention = GradientConvention::kSliceThenScaleLoss;
      const plan::AttentionPlan plan = tests::joint_plan(mode, options);
      Problem p = tests::draw_joint(3, plan, 3);
      tests::Draw draw(4);
      p.mask = draw.mask(3, 20, 0.6);
      p.mask[1].narrow(0, 3, 9).fill_(false);
      p.mask[2].fill_(false);  // a sample without a key
      const tests::Solution whole = tests::solve(p);
      const Tensor hidden = p.mask.logical_not().unsqueeze(-1).unsqueeze(-1);
      p.k = p.k.masked_fill(hidden, tests::kPad), p.v = p.v.masked_fill(hidden, tests::kPad);
      INFO(mode.name << (text == StreamPlacement::kSharded ? "" : ", text replicated"));
      const JointResult result = tests::run_joint(plan, p);
      tests::check_joint(result, whole);
      CHECK(all_zero(result.dk.masked_select(hidden)));
      CHECK(all_zero(result.dv.masked_select(hidden)));
      CHECK(all_zero(result.out[2]));
      int64_t pads = 0;
      for (size_t r = 0; r < result.outs.size(); ++r) {
        for (size_t s = 0; s < 2; ++s) {
          if (plan.streams[s].placement == StreamPlacement::kReplicated) continue;
          const int64_t rows = plan.streams[s].shards[r].size();
          const auto pad_rows = [&](const Tensor& x) {
            return x.narrow(1, rows, x.size(1) - rows);
          };
          pads += pad_rows(result.outs[r][s]).numel();
          CHECK(all_zero(pad_rows(result.outs[r][s])));
          for (size_t i = 0; i < 3; ++i) CHECK(all_zero(pad_rows(result.grads[r][3 * s + i])));
        }
      }
      CHECK((pads > 0 || plan.sp() == 1));
    }
  }
}

// ---- gradient conventions of replicated text

// Cotangents of the text on each rank; the loss is on text alone. Returns the ranks' gradients,
// summed, against those of `whole`.
JointResult run_text_loss(const plan::AttentionPlan& plan, const Problem& p,
                          const Tensors& text_cotangents) {
  sim::World world(plan.sp());
  std::vector<Tensors> outs(static_cast<size_t>(plan.sp()));
  std::vector<Tensors> grads = on_ranks(world, [&](sim::RankContext& rank) {
    const comm::Mesh mesh(rank, plan.mesh);
    const auto r = static_cast<size_t>(rank.rank());
    const auto inputs = tests::local_inputs(plan, p, rank.rank());
    const auto result = tests::make_attention(plan, mesh)(inputs, p.mask, p.scale);
    outs[r] = {result.streams[0].detach(), result.streams[1].detach()};
    Tensors leaves;
    for (const StreamQkv& s : inputs) leaves.insert(leaves.end(), {s.q, s.k, s.v});
    return torch::autograd::grad({result.streams[0]}, leaves, {text_cotangents[r]});
  });
  return tests::gather_results(plan, std::move(outs), std::move(grads));
}

plan::AttentionPlan replicated_plan(const Mode& mode, GradientConvention convention) {
  JointOptions options;
  options.text_placement = StreamPlacement::kReplicated;
  options.convention = convention;
  return tests::joint_plan(mode, options);
}

TEST_CASE("sequence parallel: conventions for a loss that is the same on all ranks",
          "[attention][sp]") {
  for (const Mode& mode : modes()) {
    for (const GradientConvention convention :
         {GradientConvention::kSliceThenScaleLoss, GradientConvention::kSliceTimesSp,
          GradientConvention::kSumThenSlice}) {
      const plan::AttentionPlan plan = replicated_plan(mode, convention);
      Problem p = tests::draw_joint(5, plan);
      p.dout.narrow(1, 7, 13).zero_();  // no loss on the image
      const tests::Solution whole = tests::solve(p);
      // The ranks' mean of one loss: each has 1/sp of it, except that users of A multiply by sp.
      const bool scaled = convention == GradientConvention::kSliceThenScaleLoss;
      const Tensor cotangent = p.dout.narrow(1, 0, 7) / (scaled ? 1 : plan.sp());
      INFO(mode.name << ", convention " << plan::to_string(convention));
      const JointResult result =
          run_text_loss(plan, p, Tensors(static_cast<size_t>(plan.sp()), cotangent));
      tests::check_joint(result, whole);
      for (const Tensors& outs : result.outs) CHECK(at::equal(outs[0], result.outs[0][0]));
      // Partial: a rank's share of a replicated input's gradient is that of its own rows.
      for (size_t r = 0; r < result.grads.size(); ++r) {
        const plan::Interval own = plan.streams[0].shards[r];
        for (size_t i = 0; i < 3; ++i) {
          Tensor others = result.grads[r][i].clone();
          others.narrow(1, own.begin, own.size()).zero_();
          CHECK(all_zero(others));
        }
      }
    }
  }
}

TEST_CASE("sequence parallel: only convention C is a gradient of a rank-dependent loss",
          "[attention][sp]") {
  for (const Mode& mode : modes()) {
    if (mode.mesh.sp() == 1) continue;
    for (const GradientConvention convention :
         {GradientConvention::kSliceThenScaleLoss, GradientConvention::kSliceTimesSp,
          GradientConvention::kSumThenSlice}) {
      const plan::AttentionPlan plan = replicated_plan(mode, convention);
      Problem p = tests::draw_joint(6, plan);
      p.dout.zero_();
      tests::Draw draw(7);
      Tensors cotangents;
      for (int r = 0; r < plan.sp(); ++r) {
        cotangents.push_back(draw.normal({2, 7, 5, 8}));
        p.dout.narrow(1, 0, 7) += cotangents.back();  // the sum of the ranks' losses
      }
      const tests::Solution whole = tests::solve(p);
      INFO(mode.name << ", convention " << plan::to_string(convention));
      const JointResult result = run_text_loss(plan, p, cotangents);
      if (convention == GradientConvention::kSumThenSlice) {
        tests::check_joint(result, whole);
      } else {
        CHECK(error(result.dq, whole.dq) > 0.1);
        CHECK(error(result.dv, whole.dv) > 0.1);
      }
    }
  }
}

TEST_CASE("sequence parallel: convention C adds 16-bit cotangents up in fp32", "[attention][sp]") {
  const Mode ulysses{"ulysses", {1, 1, 4}, plan::RingMode::kRotate};
  const plan::AttentionPlan plan = replicated_plan(ulysses, GradientConvention::kSumThenSlice);
  const Problem p = tests::draw_joint(13, plan, 2, at::kBFloat16);
  tests::Draw draw(14);
  Tensors cotangents, sum_on_rank_0(4, at::zeros({2, 7, 5, 8}, at::kBFloat16));
  Tensor sum = at::zeros({2, 7, 5, 8}, at::kFloat);
  for (int r = 0; r < 4; ++r) {
    cotangents.push_back(draw.normal({2, 7, 5, 8}, at::kBFloat16));
    sum += cotangents.back().to(at::kFloat);
  }
  sum_on_rank_0[0] = sum.to(at::kBFloat16);
  const JointResult spread = run_text_loss(plan, p, cotangents);
  const JointResult summed = run_text_loss(plan, p, sum_on_rank_0);
  CHECK(at::equal(spread.dq, summed.dq));
  CHECK(at::equal(spread.dk, summed.dk));
  CHECK(at::equal(spread.dv, summed.dv));
}

// The simulator adds up in fp32 whatever it is given; NCCL rounds at every hop.
TEST_CASE("sequence parallel: what is added up on the way travels in fp32", "[attention][sp]") {
  int sums = 0, values = 0;
  for (const Mode& mode : modes()) {
    const plan::AttentionPlan plan = replicated_plan(mode, GradientConvention::kSumThenSlice);
    const Problem p = tests::draw_joint(18, plan, 1, at::kBFloat16);
    sim::World world(plan.sp());
    world.run([&](sim::RankContext& rank) {
      const comm::Mesh mesh(rank, plan.mesh);
      const auto inputs = tests::local_inputs(plan, p, rank.rank());
      const auto result = tests::make_attention(plan, mesh, at::kBFloat16)(inputs);
      torch::autograd::backward(result.streams, tests::local_cotangents(plan, p, rank.rank()));
    });
    for (const CollectiveCall& call : world.calls(0)) {
      const bool is_sum = call.kind == CallKind::kReduceScatter || contains(call.tag, "dkv.");
      INFO(mode.name << ": " << call.tag << ", " << call.describe());
      CHECK(call.dtype == (is_sum ? "Float" : "BFloat16"));
      (is_sum ? sums : values) += 1;
    }
  }
  CHECK(sums > 8);
  CHECK(values > 8);
}

// ---- the log-sum-exp and the scale

TEST_CASE("sequence parallel: the log-sum-exp of this rank's heads and block", "[attention][sp]") {
  for (const Mode& mode : modes()) {
    const plan::AttentionPlan plan = tests::joint_plan(mode);
    Problem p = tests::draw_joint(8, plan);
    sim::World world(plan.sp());
    const auto lses = on_ranks(world, [&](sim::RankContext& rank) -> Tensors {
      const comm::Mesh mesh(rank, plan.mesh);
      return {tests::make_attention(plan, mesh)(tests::local_inputs(plan, p, rank.rank())).lse};
    });
    const tests::Solution whole = tests::solve(p);  // the default scale is 1/sqrt(D)
    for (int r = 0; r < plan.sp(); ++r) {
      const plan::Interval heads = plan.heads[static_cast<size_t>(r % plan.mesh.ulysses)].q;
      const auto& tokens = plan.block_tokens[static_cast<size_t>(r / plan.mesh.ulysses)];
      const Tensor expected = whole.lse.narrow(1, heads.begin, heads.size())
                                  .index_select(2, at::tensor(tokens, at::kLong));
      const Tensor& lse = lses[static_cast<size_t>(r)][0];
      INFO(mode.name << ", rank " << r);
      CHECK(tests::max_abs(lse, expected) <= 1e-13);
      CHECK(!lse.requires_grad());
    }
  }
}

// ---- tags

std::vector<std::string> tags_of(const plan::AttentionPlan& plan) {
  const Problem p = tests::draw_joint(9, plan);
  sim::World world(plan.sp());
  world.run([&](sim::RankContext& rank) {
    const comm::Mesh mesh(rank, plan.mesh);
    const auto inputs = tests::local_inputs(plan, p, rank.rank());
    SequenceParallelOutput result;
    {
      const comm::CollectiveScope block("transformer_blocks.3"), site("attn");
      result = tests::make_attention(plan, mesh)(inputs);
    }
    const comm::CollectiveScope elsewhere("optimizer");  // where the backward happens to run
    torch::autograd::backward(result.streams, tests::local_cotangents(plan, p, rank.rank()));
  });
  // A step may be several calls (send and receive, one message a tensor): one entry.
  const auto steps = [&](int rank) {
    std::vector<std::string> tags;
    for (const CollectiveCall& call : world.calls(rank)) {
      if (tags.empty() || tags.back() != call.tag) tags.push_back(call.tag);
    }
    return tags;
  };
  for (int r = 1; r < plan.sp(); ++r) CHECK(steps(r) == steps(0));
  return steps(0);
}

TEST_CASE("sequence parallel: collectives carry the forward's path, adjoints a prime",
          "[attention][sp]") {
  const std::string at = "transformer_blocks.3/attn/";
  const std::string in = at + "qkv.seq_to_head", out = at + "out.head_to_seq";
  using Tags = std::vector<std::string>;
  CHECK(tags_of(tests::joint_plan(mode_called("local"))) == Tags{});
  CHECK(tags_of(tests::joint_plan(mode_called("ulysses"))) == Tags{in, out, out + "'", in + "'"});

  const std::string kv = at + "kv.rotate", dkv = at + "dkv.rotate'", kv_back = kv + "'";
  const Mode two{"ring", {1, 2, 1}, plan::RingMode::kRotate};
  CHECK(tags_of(tests::joint_plan(two)) == Tags{kv, kv_back, dkv});

  const std::string gather = at + "kv.gather", scatter = at + "dkv.scatter'";
  CHECK(tags_of(tests::joint_plan(mode_called("allgather"))) ==
        Tags{gather, gather + "'", scatter});
  CHECK(tags_of(tests::joint_plan(mode_called("hybrid_allgather"))) ==
        Tags{in, gather, out, out + "'", gather + "'", scatter, in + "'"});

  const std::string text = at + "text.gather";
  const Mode ulysses = mode_called("ulysses");
  CHECK(tags_of(replicated_plan(ulysses, GradientConvention::kSumThenSlice)) ==
        Tags{in, out, text, text + "'", out + "'", in + "'"});
  for (const auto slices :
       {GradientConvention::kSliceThenScaleLoss, GradientConvention::kSliceTimesSp}) {
    CHECK(tags_of(replicated_plan(ulysses, slices)) == Tags{in, out, text, out + "'", in + "'"});
  }
}

}  // namespace
}  // namespace shardproof::attention
