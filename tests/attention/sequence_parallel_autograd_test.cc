// Sequence-parallel attention as a part of a graph: what autograd makes of it on each rank.
#include "attention/sequence_parallel.h"

#include "tests/catch.h"

#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <limits>

#include "comm/mesh.h"
#include "tests/attention/parallel_support.h"
#include "tests/file_support.h"

namespace shardproof::attention {
namespace {

using at::Tensor;
using tests::Draw;
using tests::error;
using tests::JointOptions;
using tests::Mode;
using tests::modes;
using tests::on_ranks;
using tests::Problem;
using tests::Tensors;
using torch::autograd::grad;

constexpr double kInf = std::numeric_limits<double>::infinity();

// Plain attention for autograd, q, k, v [B,S,H,D].
Tensor plain_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask) {
  const double scale = 1 / std::sqrt(static_cast<double>(q.size(3)));
  Tensor logits = at::einsum("bihd,bjhd->bhij", {q, k}) * scale;
  if (mask.defined()) {
    logits = logits.masked_fill(mask.logical_not().unsqueeze(1).unsqueeze(1), -kInf);
  }
  return at::einsum("bhij,bjhd->bihd", {at::softmax(logits, -1), v});
}

// ---- a layer: projections, attention, projection

constexpr int64_t kChannels = 12, kHeads = 5, kDim = 4;

struct Weights {
  Tensor q, k, v, out;
  Tensors all() const { return {q, k, v, out}; }
};

Weights draw_weights(uint64_t seed) {
  Draw draw(seed);
  const auto leaf = [&](int64_t rows, int64_t columns) {
    return (draw.normal({rows, columns}) * 0.3).requires_grad_(true);
  };
  return {leaf(kChannels, kHeads * kDim), leaf(kChannels, kHeads * kDim),
          leaf(kChannels, kHeads * kDim), leaf(kHeads * kDim, kChannels)};
}

StreamQkv project(const Tensor& x, const Weights& w) {
  const auto heads = [&](const Tensor& weight) {
    return at::matmul(x, weight).view({x.size(0), x.size(1), kHeads, kDim});
  };
  return {heads(w.q), heads(w.k), heads(w.v)};
}

Tensor finish(const Tensor& out, const Weights& w) {
  return at::gelu(at::matmul(out.flatten(2), w.out));
}

// Token t of a replicated stream counts on rank t mod sp only, so that the ranks' losses add up.
Tensor counted(const plan::AttentionPlan& plan, size_t stream, int rank) {
  const plan::StreamPlan& s = plan.streams[stream];
  if (s.placement == plan::StreamPlacement::kSharded) return at::ones({1, 1, 1}, at::kDouble);
  return at::arange(s.tokens).remainder(plan.sp()).eq(rank).view({1, -1, 1}).to(at::kDouble);
}

TEST_CASE("sequence parallel: gradients of a layer's parameters add up over ranks",
          "[attention][sp][autograd]") {
  for (const Mode& mode : modes()) {
    for (const auto text : {plan::StreamPlacement::kSharded, plan::StreamPlacement::kReplicated}) {
      JointOptions options;
      options.text_placement = text;
      const plan::AttentionPlan plan = tests::joint_plan(mode, options);
      Draw draw(1);
      const Tensor x = draw.normal({2, 20, kChannels}), target = draw.normal({2, 20, kChannels});
      Tensor mask = draw.mask(2, 20, 0.7);

      const Weights whole = draw_weights(2);
      const Tensor x_whole = x.clone().requires_grad_(true);
      const StreamQkv s = project(x_whole, whole);
      const Tensor loss =
          (finish(plain_attention(s.q, s.k, s.v, mask), whole) - target).square().sum();
      Tensors wanted = whole.all();
      wanted.push_back(x_whole);
      const Tensors expected = grad({loss}, wanted);

      sim::World world(plan.sp());
      const auto grads = on_ranks(world, [&](sim::RankContext& rank) {
        const comm::Mesh mesh(rank, plan.mesh);
        const int r = rank.rank();
        const Weights w = draw_weights(2);
        Tensors leaves = w.all();
        std::vector<StreamQkv> inputs;
        for (size_t i = 0; i < 2; ++i) {
          leaves.push_back(tests::local_rows(plan, x, i, r).clone().requires_grad_(true));
          inputs.push_back(project(leaves.back(), w));
        }
        const auto result = tests::make_attention(plan, mesh)(inputs, mask);
        Tensor local = at::zeros({}, at::kDouble);
        for (size_t i = 0; i < 2; ++i) {
          const Tensor miss = finish(result.streams[i], w) - tests::local_rows(plan, target, i, r);
          local = local + (miss.square() * counted(plan, i, r)).sum();
        }
        return grad({local}, leaves);
      });
      INFO(mode.name << (text == plan::StreamPlacement::kSharded ? "" : ", text replicated"));
      for (size_t i = 0; i < 4; ++i) {
        Tensor sum = at::zeros_like(expected[i]);
        for (const Tensors& rank : grads) sum += rank[i];
        INFO("parameter " << i);
        CHECK(error(sum, expected[i]) <= 1e-13);
      }
      std::vector<Tensors> x_grads;
      for (const Tensors& rank : grads) x_grads.push_back({rank[4], rank[5]});
      CHECK(error(tests::joined(plan, x_grads, tests::Replicas::kSum), expected[4]) <= 1e-13);
    }
  }
}

// ---- one tensor in several places

TEST_CASE("sequence parallel: one tensor as query, key and value", "[attention][sp][autograd]") {
  for (const Mode& mode : modes()) {
    const plan::AttentionPlan plan = tests::joint_plan(mode);
    Problem p = tests::draw_joint(3, plan);
    p.k = p.v = p.q;
    const tests::Solution whole = tests::solve(p);
    sim::World world(plan.sp());
    const auto grads = on_ranks(world, [&](sim::RankContext& rank) {
      const comm::Mesh mesh(rank, plan.mesh);
      std::vector<StreamQkv> inputs = tests::local_inputs(plan, p, rank.rank());
      for (StreamQkv& s : inputs) s.k = s.v = s.q;
      const auto result = tests::make_attention(plan, mesh)(inputs);
      return grad(result.streams, {inputs[0].q, inputs[1].q},
                  tests::local_cotangents(plan, p, rank.rank()));
    });
    INFO(mode.name);
    CHECK(error(tests::joined(plan, grads, tests::Replicas::kSum),
                whole.dq + whole.dk + whole.dv) <= 1e-13);
  }
}

// Two live objects; the second call's backward runs first.
TEST_CASE("sequence parallel: one query tensor in two calls", "[attention][sp][autograd]") {
  for (const Mode& mode : modes()) {
    const plan::AttentionPlan plan = tests::joint_plan(mode);
    const Problem first = tests::draw_joint(4, plan);
    Problem second = tests::draw_joint(5, plan);
    second.q = first.q;
    const Tensor expected = tests::solve(first).dq + tests::solve(second).dq;
    sim::World world(plan.sp());
    const auto grads = on_ranks(world, [&](sim::RankContext& rank) {
      const comm::Mesh mesh(rank, plan.mesh);
      const int r = rank.rank();
      const auto one = tests::make_attention(plan, mesh), other = tests::make_attention(plan, mesh);
      const std::vector<StreamQkv> a = tests::local_inputs(plan, first, r);
      std::vector<StreamQkv> b = tests::local_inputs(plan, second, r);
      for (size_t s = 0; s < 2; ++s) b[s].q = a[s].q;
      Tensors outs = one(a).streams, cotangents = tests::local_cotangents(plan, first, r);
      for (const Tensor& out : other(b).streams) outs.push_back(out);
      for (const Tensor& c : tests::local_cotangents(plan, second, r)) cotangents.push_back(c);
      return grad(outs, {a[0].q, a[1].q}, cotangents);
    });
    INFO(mode.name);
    CHECK(error(tests::joined(plan, grads, tests::Replicas::kSum), expected) <= 1e-13);
  }
}

// ---- parts of the graph

// Gradients of run_joint, in the order of its leaves.
std::vector<Tensors> all_gradients(const plan::AttentionPlan& plan, const Problem& p) {
  return tests::run_joint(plan, p).grads;
}

TEST_CASE("sequence parallel: only some inputs require a gradient", "[attention][sp][autograd]") {
  for (const Mode& mode : modes()) {
    const plan::AttentionPlan plan = tests::joint_plan(mode);
    const Problem p = tests::draw_joint(6, plan);
    const std::vector<Tensors> all = all_gradients(plan, p);
    for (size_t wanted = 0; wanted < 6; ++wanted) {
      sim::World world(plan.sp());
      const auto grads = on_ranks(world, [&](sim::RankContext& rank) -> Tensors {
        const comm::Mesh mesh(rank, plan.mesh);
        std::vector<StreamQkv> inputs = tests::local_inputs(plan, p, rank.rank());
        Tensor leaf;
        size_t i = 0;
        for (StreamQkv& s : inputs) {
          for (Tensor* x : {&s.q, &s.k, &s.v}) {
            x->requires_grad_(i == wanted);
            if (i++ == wanted) leaf = *x;
          }
        }
        const auto result = tests::make_attention(plan, mesh)(inputs);
        torch::autograd::backward(result.streams, tests::local_cotangents(plan, p, rank.rank()));
        Tensors own = {leaf.grad()};
        for (const StreamQkv& s : inputs) {
          for (const Tensor& x : {s.q, s.k, s.v}) {
            if (!x.is_same(leaf) && x.grad().defined()) own.push_back(x.grad());
          }
        }
        return own;
      });
      for (size_t r = 0; r < grads.size(); ++r) {
        INFO(mode.name << ", input " << wanted << ", rank " << r);
        REQUIRE(grads[r].size() == 1);
        CHECK(at::equal(grads[r][0], all[r][wanted]));
      }
    }
  }
}

TEST_CASE("sequence parallel: an output that the loss does not use", "[attention][sp][autograd]") {
  for (const Mode& mode : modes()) {
    for (const size_t used : {0, 1}) {
      const plan::AttentionPlan plan = tests::joint_plan(mode);
      Problem p = tests::draw_joint(7, plan);
      const std::pair<int64_t, int64_t> unused = used == 0 ? std::pair(7, 13) : std::pair(0, 7);
      Problem zeroed = p;
      zeroed.dout = p.dout.clone();
      zeroed.dout.narrow(1, unused.first, unused.second).zero_();
      const std::vector<Tensors> expected = all_gradients(plan, zeroed);
      sim::World world(plan.sp());
      const auto grads = on_ranks(world, [&](sim::RankContext& rank) {
        const comm::Mesh mesh(rank, plan.mesh);
        const std::vector<StreamQkv> inputs = tests::local_inputs(plan, p, rank.rank());
        const auto result = tests::make_attention(plan, mesh)(inputs);
        const Tensor stranger = at::ones({2}, at::kDouble).requires_grad_(true);
        return grad({result.streams[used]},
                    {inputs[0].q, inputs[0].k, inputs[0].v, inputs[1].q, inputs[1].k, inputs[1].v,
                     stranger},
                    {tests::local_cotangents(plan, p, rank.rank())[used]}, {}, false,
                    /*allow_unused=*/true);
      });
      for (size_t r = 0; r < grads.size(); ++r) {
        INFO(mode.name << ", loss on stream " << used << ", rank " << r);
        CHECK(!grads[r][6].defined());
        for (size_t i = 0; i < 6; ++i) CHECK(at::equal(grads[r][i], expected[r][i]));
      }
    }
  }
}

TEST_CASE("sequence parallel: a graph that is kept gives the same gradients again",
          "[attention][sp][autograd]") {
  for (const Mode& mode : modes()) {
    const plan::AttentionPlan plan = tests::joint_plan(mode);
    const Problem p = tests::draw_joint(8, plan);
    sim::World world(plan.sp());
    const auto grads = on_ranks(world, [&](sim::RankContext& rank) {
      const comm::Mesh mesh(rank, plan.mesh);
      const std::vector<StreamQkv> inputs = tests::local_inputs(plan, p, rank.rank());
      SequenceParallelOutput result;
      {
        // What the graph needs must outlive the object that made it.
        const auto attend = tests::make_attention(plan, mesh);
        result = attend(inputs);
      }
      const Tensors cotangents = tests::local_cotangents(plan, p, rank.rank());
      const Tensors leaves = {inputs[0].q, inputs[0].k, inputs[0].v};
      Tensors twice = grad(result.streams, leaves, cotangents, /*retain_graph=*/true);
      for (const Tensor& g : grad(result.streams, leaves, cotangents)) twice.push_back(g);
      return twice;
    });
    INFO(mode.name);
    for (const Tensors& rank : grads) {
      for (size_t i = 0; i < 3; ++i) CHECK(at::equal(rank[i], rank[i + 3]));
    }
  }
}

TEST_CASE("sequence parallel: nothing is recorded in no-grad mode or without gradients",
          "[attention][sp][autograd]") {
  for (const Mode& mode : modes()) {
    const plan::AttentionPlan plan = tests::joint_plan(mode);
    const Problem p = tests::draw_joint(9, plan);
    const Tensor expected = tests::run_joint(plan, p).out;
    for (const bool no_grad : {true, false}) {
      sim::World world(plan.sp());
      const auto outs = on_ranks(world, [&](sim::RankContext& rank) {
        const comm::Mesh mesh(rank, plan.mesh);
        std::vector<StreamQkv> inputs = tests::local_inputs(plan, p, rank.rank());
        at::AutoGradMode mode_of_thread(!no_grad);
        if (!no_grad) {
          for (StreamQkv& s : inputs) s = {s.q.detach(), s.k.detach(), s.v.detach()};
        }
        return tests::make_attention(plan, mesh)(inputs).streams;
      });
      INFO(mode.name << (no_grad ? ", no-grad mode" : ", no input requires a gradient"));
      for (const Tensors& rank : outs) {
        for (const Tensor& out : rank) CHECK(!out.requires_grad());
      }
      CHECK(at::equal(tests::joined(plan, outs, tests::Replicas::kFirst), expected));
      for (int r = 0; r < plan.sp(); ++r) {
        for (const CollectiveCall& call : world.calls(r)) CHECK(call.tag.back() != '\'');
      }
    }
  }
}

// ---- tensors that change between forward and backward

struct Live {
  std::vector<StreamQkv> inputs;
  Tensor mask;
  SequenceParallelOutput result;
};

// Whether `change`, made on every rank between forward and backward, was detected; if it was not,
// the gradients must be the right ones.
bool is_detected(const plan::AttentionPlan& plan, int64_t batch,
                 const std::function<void(Live&)>& change) {
  Problem p = tests::draw_joint(10, plan, batch);
  p.mask = Draw(11).mask(batch, plan.joint_tokens(), 0.7);
  const std::vector<Tensors> expected = all_gradients(plan, p);
  sim::World world(plan.sp());
  std::vector<Tensors> grads;
  try {
    grads = on_ranks(world, [&](sim::RankContext& rank) {
      const comm::Mesh mesh(rank, plan.mesh);
      Live live{tests::local_inputs(plan, p, rank.rank()), p.mask.clone(), {}};
      live.result = tests::make_attention(plan, mesh)(live.inputs, live.mask);
      const Tensors outs = live.result.streams;
      {
        const at::NoGradGuard unnoticed;
        change(live);
      }
      Tensors leaves;
      for (const StreamQkv& s : live.inputs) leaves.insert(leaves.end(), {s.q, s.k, s.v});
      return grad(outs, leaves, tests::local_cotangents(plan, p, rank.rank()));
    });
  } catch (const Error& error) {
    INFO(error.what());
    // In so many words for a tensor, in others for a view of one.
    CHECK((tests::contains(error.what(), "modified by an inplace operation") ||
           tests::contains(error.what(), "modified inplace")));
    return true;
  }
  for (size_t r = 0; r < grads.size(); ++r) {
    INFO("rank " << r);
    for (size_t i = 0; i < grads[r].size(); ++i) CHECK(at::equal(grads[r][i], expected[r][i]));
  }
  return false;
}

TEST_CASE("sequence parallel: tensors that change between forward and backward",
          "[attention][sp][autograd]") {
  for (const Mode& mode : modes()) {
    for (const int64_t text : {0, 7}) {
      for (const int64_t batch : {1, 2}) {
        INFO(mode.name << ", " << text << " text tokens, batch " << batch);
        JointOptions options;
        options.text = text;
        const plan::AttentionPlan plan = tests::joint_plan(mode, options);
        CHECK(is_detected(plan, batch, [](Live& l) { l.result.lse.add_(1); }));
        // Where an output is the saved tensor itself, autograd notices that it was changed.
        const bool is_saved = mode.mesh.ulysses == 1 && text == 0;
        const auto change_outputs = [](Live& l) {
          for (Tensor& out : l.result.streams) out.mul_(2);
        };
        CHECK(is_detected(plan, batch, change_outputs) == is_saved);
        // Inputs are saved themselves or were packed into messages: then a change does no harm.
        const bool inputs_are_saved = is_detected(plan, batch, [](Live& l) {
          for (StreamQkv& s : l.inputs) s.q.zero_(), s.k.zero_(), s.v.zero_();
        });
        CHECK((!inputs_are_saved || (mode.mesh.ulysses == 1 && text == 0)));
        CHECK(!is_detected(plan, batch, [](Live& l) { l.mask.logical_not_(); }));
      }
    }
  }
}

// As models do to save memory: out *= gate.
TEST_CASE("sequence parallel: outputs may be changed in place under autograd",
          "[attention][sp][autograd]") {
  for (const Mode& mode : modes()) {
    for (const auto& [text, batch] : {std::pair(7, 1), std::pair(7, 2), std::pair(0, 1)}) {
      if (text == 0 && mode.mesh.ulysses == 1) continue;  // there the backward reads the output
      JointOptions options;
      options.text = text;
      const plan::AttentionPlan plan = tests::joint_plan(mode, options);
      const Problem p = tests::draw_joint(12, plan, batch);
      Problem doubled = p;
      doubled.dout = 2 * p.dout;
      sim::World world(plan.sp());
      const auto grads = on_ranks(world, [&](sim::RankContext& rank) {
        const comm::Mesh mesh(rank, plan.mesh);
        const std::vector<StreamQkv> inputs = tests::local_inputs(plan, p, rank.rank());
        auto result = tests::make_attention(plan, mesh)(inputs);
        for (Tensor& out : result.streams) out.mul_(2);
        Tensors queries;
        for (const StreamQkv& s : inputs) queries.push_back(s.q);
        return grad(result.streams, queries, tests::local_cotangents(plan, p, rank.rank()));
      });
      INFO(mode.name << ", " << text << " text tokens, batch " << batch);
      CHECK(error(tests::joined(plan, grads, tests::Replicas::kSum), tests::solve(doubled).dq) <=
            1e-13);
    }
  }
}

}  // namespace
}  // namespace shardproof::attention
