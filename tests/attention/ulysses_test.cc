// The two all-to-alls of Ulysses against direct index computations, as adjoints, and both of their
// code paths against each other.
#include "attention/ulysses.h"

#include "tests/catch.h"

#include "comm/mesh.h"
#include "tests/attention/attention_support.h"

namespace shardproof::attention {
namespace {

using at::Tensor;
using comm::MeshShape;
using plan::Interval;
using tests::Draw;
using tests::on_ranks;
using tests::Tensors;

constexpr int64_t kDim = 3;

struct Layout {
  MeshShape mesh;
  std::vector<int64_t> tokens;  // per stream
  int64_t heads, kv_heads;
  plan::HeadSplit split;
  int64_t batch = 2;
};

plan::AttentionPlan make_plan(const Layout& l) {
  plan::AttentionPlanOptions options;
  options.mesh = l.mesh;
  options.q_heads = l.heads, options.kv_heads = l.kv_heads;
  options.head_split = l.split;
  for (size_t s = 0; s < l.tokens.size(); ++s) {
    options.streams.push_back({fmt::format("stream{}", s), l.tokens[s]});
  }
  return plan::make_attention_plan(options);
}

// Every mesh of 1 to 8 ranks with rows and heads that do not divide, and grouped KV heads.
std::vector<Layout> uneven_layouts() {
  std::vector<Layout> all;
  for (int u = 1; u <= 8; ++u) {
    for (const int ring : {1, 2}) {
      if (u * ring > 8) continue;
      const MeshShape mesh{1, ring, u};
      const int64_t n = u * ring;
      all.push_back({mesh, {2 * n + 1}, u + 1, u + 1, plan::HeadSplit::kUneven});
      all.push_back({mesh, {n - 1, 3 * n + 2}, u + 2, 1, plan::HeadSplit::kPadded});
      all.push_back({mesh, {5, n}, 2 * u, u, plan::HeadSplit::kEven, 1});
      all.push_back(
          {mesh, {3 * n - 1}, 6, 3, u <= 6 ? plan::HeadSplit::kUneven : plan::HeadSplit::kPadded});
      all.push_back({mesh, {2, n}, 1, 1, plan::HeadSplit::kPadded});  // ranks without a real head
    }
  }
  return all;
}

std::string describe(const Layout& l) {
  return fmt::format("{}, {} query and {} KV heads, {}, batch {}, tokens {}", l.mesh.to_string(),
                     l.heads, l.kv_heads, plan::to_string(l.split), l.batch,
                     fmt::join(l.tokens, "+"));
}

// Per SP rank, part and stream: [B, own rows, heads, D].
using Held = std::vector<std::vector<Tensors>>;

Held draw_held(Draw& draw, const plan::AttentionPlan& plan, const HeadRoute& route, int64_t batch,
               at::ScalarType dtype) {
  Held held(static_cast<size_t>(plan.sp()));
  for (size_t r = 0; r < held.size(); ++r) {
    for (const HeadRoute::Part& part : route.parts) {
      Tensors streams;
      for (const plan::StreamPlan& stream : plan.streams) {
        streams.push_back(draw.normal({batch, stream.shards[r].size(), part.heads, kDim}, dtype));
      }
      held[r].push_back(streams);
    }
  }
  return held;
}

// Heads [interval) of x; those that x does not have are zeros.
Tensor heads_of(const Tensor& x, Interval interval) {
  Tensors heads;
  for (int64_t h = interval.begin; h < interval.end; ++h) {
    heads.push_back(h < x.size(2) ? x.select(2, h) : at::zeros_like(x.select(2, 0)));
  }
  return at::stack(heads, 2);
}

// What rank r must hold of a part: for each member of its group, that member's rows of all streams.
Tensor expected_heads(const plan::AttentionPlan& plan, const HeadRoute& route, const Held& held,
                      size_t part, int r) {
  const int u = plan.mesh.ulysses, first = r / u * u;
  Tensors rows;
  for (int member = first; member < first + u; ++member) {
    for (const Tensor& stream : held[static_cast<size_t>(member)][part]) {
      rows.push_back(heads_of(stream, route.parts[part].owned[static_cast<size_t>(r % u)]));
    }
  }
  return at::cat(rows, 1);
}

struct Both {
  std::vector<Tensors> heads;  // per rank and part: seq_to_head(held)
  std::vector<Tensors> back;   // per rank and part: head_to_seq(of `sent`, or of `heads`)
};

Both run(const plan::AttentionPlan& plan, const HeadRoute& route, const Held& held,
         const std::vector<Tensors>* sent = nullptr) {
  sim::World world(plan.sp());
  Both both;
  both.heads.resize(static_cast<size_t>(plan.sp()));
  both.back = on_ranks(world, [&](sim::RankContext& rank) {
    const comm::Mesh mesh(rank, plan.mesh);
    const Ulysses ulysses(plan, mesh.ulysses(), mesh.sp_rank());
    const auto r = static_cast<size_t>(rank.rank());
    both.heads[r] = ulysses.seq_to_head(route, held[r]);
    return ulysses.head_to_seq(route, sent ? (*sent)[r] : both.heads[r]);
  });
  return both;
}

TEST_CASE("ulysses: every row and head arrives where the plan says", "[attention][ulysses]") {
  for (const at::ScalarType dtype : {at::kDouble, at::kBFloat16}) {
    for (const Layout& layout : uneven_layouts()) {
      INFO(describe(layout) << " " << c10::toString(dtype));
      const plan::AttentionPlan plan = make_plan(layout);
      for (const HeadRoute& route : {qkv_route(plan), query_route(plan)}) {
        Draw draw(1);
        const Held held = draw_held(draw, plan, route, layout.batch, dtype);
        const Both both = run(plan, route, held);
        for (int r = 0; r < plan.sp(); ++r) {
          const auto i = static_cast<size_t>(r);
          REQUIRE(both.heads[i].size() == route.parts.size());
          for (size_t p = 0; p < route.parts.size(); ++p) {
            INFO("rank " << r << ", part " << p);
            CHECK(at::equal(both.heads[i][p], expected_heads(plan, route, held, p, r)));
          }
        }
      }
    }
  }
}

// How many Ulysses ranks hold a head of a part.
Tensor copies(const HeadRoute::Part& part) {
  Tensor count = at::zeros({part.heads}, at::kDouble);
  for (const Interval& owned : part.owned) {
    for (int64_t h = owned.begin; h < std::min(owned.end, part.heads); ++h) count[h] += 1;
  }
  return count.view({1, 1, -1, 1});
}

TEST_CASE("ulysses: there and back is the identity, times the copies of a head",
          "[attention][ulysses]") {
  int replicated = 0;
  for (const Layout& layout : uneven_layouts()) {
    INFO(describe(layout));
    const plan::AttentionPlan plan = make_plan(layout);
    const HeadRoute route = qkv_route(plan);
    Draw draw(2);
    const Held held = draw_held(draw, plan, route, layout.batch, at::kDouble);
    const Both both = run(plan, route, held);
    for (size_t r = 0; r < held.size(); ++r) {
      for (size_t p = 0; p < route.parts.size(); ++p) {
        const Tensor count = copies(route.parts[p]);
        CHECK(count.ge(1).all().item<bool>());
        if (p == 0) CHECK(count.eq(1).all().item<bool>());  // query heads have one owner
        replicated += count.gt(1).any().item<bool>();
        // Sums of up to 8 equal numbers: exact for powers of two only.
        const Tensor expected = at::cat(held[r][p], 1) * count;
        CHECK(tests::error(both.back[r][p], expected) <= 1e-15);
      }
    }
  }
  CHECK(replicated > 50);
}

double product(const Tensor& a, const Tensor& b) { return (a * b).sum().item<double>(); }

TEST_CASE("ulysses: the two all-to-alls are adjoint", "[attention][ulysses]") {
  for (const Layout& layout : uneven_layouts()) {
    INFO(describe(layout));
    const plan::AttentionPlan plan = make_plan(layout);
    const HeadRoute route = qkv_route(plan);
    Draw draw(3);
    const Held x = draw_held(draw, plan, route, layout.batch, at::kDouble);
    // y on the heads' side, noise in the padding heads included.
    std::vector<Tensors> y(x.size());
    for (int r = 0; r < plan.sp(); ++r) {
      const int u = plan.mesh.ulysses;
      for (const HeadRoute::Part& part : route.parts) {
        y[static_cast<size_t>(r)].push_back(
            draw.normal({layout.batch, plan.block_rows(r / u),
                         part.owned[static_cast<size_t>(r % u)].size(), kDim}));
      }
    }
    const Both both = run(plan, route, x, &y);
    double forward = 0, backward = 0, size = 0;
    for (size_t r = 0; r < x.size(); ++r) {
      for (size_t p = 0; p < route.parts.size(); ++p) {
        const Tensor held = at::cat(x[r][p], 1);
        forward += product(both.heads[r][p], y[r][p]);
        backward += product(held, both.back[r][p]);
        size += product(held, held);
      }
    }
    CHECK(std::abs(forward - backward) <= 1e-14 * size);
    CHECK(std::abs(forward) > 1e-3);
  }
}

TEST_CASE("ulysses: gradients of a replicated head are summed in fp32", "[attention][ulysses]") {
  const plan::AttentionPlan plan = make_plan({{1, 1, 8}, {16}, 8, 1, plan::HeadSplit::kEven, 1});
  const HeadRoute route = qkv_route(plan);
  Draw draw(4);
  const Held held = draw_held(draw, plan, route, 1, at::kBFloat16);
  std::vector<Tensors> grads(8);
  for (Tensors& rank : grads) {
    for (int p = 0; p < 3; ++p) rank.push_back(draw.normal({1, 16, 1, kDim}, at::kBFloat16));
  }
  const Both both = run(plan, route, held, &grads);
  for (const size_t p : {1, 2}) {
    Tensor sum = at::zeros({1, 16, 1, kDim}, at::kFloat);
    for (const Tensors& rank : grads) sum += rank[p].to(at::kFloat);
    for (int64_t r = 0; r < 8; ++r) {
      const Tensor& got = both.back[static_cast<size_t>(r)][p];
      CHECK(got.scalar_type() == at::kBFloat16);
      CHECK(at::equal(got, sum.narrow(1, 2 * r, 2).to(at::kBFloat16)));
    }
  }
}

// An additional part that one rank holds alone is not even and forces the general path on all.
HeadRoute through_general_path(const HeadRoute& even, int ulysses) {
  HeadRoute route = even;
  HeadRoute::Part lone{1, {}};
  for (int u = 0; u < ulysses; ++u) lone.owned.push_back({u == 0 ? 0 : 1, 1});
  route.parts.push_back(lone);
  return route;
}

TEST_CASE("ulysses: the even path and the general one give the same bytes",
          "[attention][ulysses]") {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    for (int u = 2; u <= 8; ++u) {
      // Rows may be uneven on either path.
      const plan::AttentionPlan plan =
          make_plan({{1, 1, u}, {u + 1, 2 * u}, 4 * u, 2 * u, plan::HeadSplit::kEven});
      const HeadRoute even = qkv_route(plan), general = through_general_path(even, u);
      Draw draw(5);
      const Held held = draw_held(draw, plan, general, 2, dtype);
      Held first_parts = held;
      for (auto& rank : first_parts) rank.resize(even.parts.size());
      const Both a = run(plan, even, first_parts), b = run(plan, general, held);
      for (size_t r = 0; r < held.size(); ++r) {
        for (size_t p = 0; p < even.parts.size(); ++p) {
          INFO(c10::toString(dtype) << ", " << u << " ranks, rank " << r << ", part " << p);
          CHECK(at::equal(a.heads[r][p], b.heads[r][p]));
          CHECK(at::equal(a.back[r][p], b.back[r][p]));
          CHECK(at::equal(a.back[r][p], at::cat(held[r][p], 1)));
        }
      }
    }
  }
}

TEST_CASE("ulysses: inputs of any strides", "[attention][ulysses]") {
  for (const plan::HeadSplit split : {plan::HeadSplit::kEven, plan::HeadSplit::kPadded}) {
    const int64_t heads = split == plan::HeadSplit::kEven ? 8 : 6;
    const plan::AttentionPlan plan = make_plan({{1, 1, 4}, {9}, heads, heads, split});
    const HeadRoute route = qkv_route(plan);
    Draw draw(6);
    const Held dense = draw_held(draw, plan, route, 2, at::kFloat);
    Held strided = dense;
    for (auto& rank : strided) {
      for (Tensors& part : rank) {
        for (Tensor& x : part) {
          x = at::stack({x, x + 1}, 2).select(2, 0).permute({3, 2, 1, 0}).contiguous();
          x = x.permute({3, 2, 1, 0});
        }
      }
    }
    const Both a = run(plan, route, dense);
    std::vector<Tensors> turned = a.heads;
    for (Tensors& parts : turned) {
      for (Tensor& x : parts) x = x.transpose(1, 2).contiguous().transpose(1, 2);
    }
    const Both b = run(plan, route, strided, &turned);
    for (size_t r = 0; r < dense.size(); ++r) {
      for (size_t p = 0; p < route.parts.size(); ++p) {
        CHECK(at::equal(a.heads[r][p], b.heads[r][p]));
        CHECK(at::equal(a.back[r][p], b.back[r][p]));
      }
    }
  }
}

TEST_CASE("ulysses: q, k and v travel in one message", "[attention][ulysses]") {
  const plan::AttentionPlan plan = make_plan({{1, 1, 4}, {6}, 8, 4, plan::HeadSplit::kEven, 1});
  sim::World world(4);
  Draw draw(7);
  const Held held = draw_held(draw, plan, qkv_route(plan), 1, at::kFloat);
  world.run([&](sim::RankContext& rank) {
    const comm::Mesh mesh(rank, plan.mesh);
    const Ulysses ulysses(plan, mesh.ulysses(), mesh.sp_rank());
    ulysses.seq_to_head(qkv_route(plan), held[static_cast<size_t>(rank.rank())]);
  });
  // Rows 2,2,1,1; to each member 2 query, 1 key and 1 value head.
  const int64_t rows[] = {2, 2, 1, 1};
  for (int r = 0; r < 4; ++r) {
    REQUIRE(world.calls(r).size() == 1);
    const CollectiveCall& call = world.calls(r)[0];
    CHECK(call.kind == CallKind::kAllToAll);
    for (size_t m = 0; m < 4; ++m) {
      CHECK(call.send[m] == rows[r] * 4 * kDim);
      CHECK(call.receive[m] == rows[m] * 4 * kDim);
    }
  }
}

}  // namespace
}  // namespace shardproof::attention
