// Every local backend that runs on a CPU against the Eigen oracle, and the choice of a backend.
#include "attention/local_attention.h"

#include "tests/catch.h"

#include <ATen/Parallel.h>

#include <cmath>
#include <limits>

#include "tests/attention/attention_support.h"
#include "tests/file_support.h"

namespace shardproof::attention {
namespace {

using at::Tensor;
using tests::all_zero;
using tests::contains;
using tests::Draw;
using tests::error;
using tests::error_text;
using tests::max_abs;
using tests::Problem;
using tests::Solution;
using tests::solve;

constexpr double kInf = std::numeric_limits<double>::infinity();

std::vector<std::string> cpu_backends() {
  std::vector<std::string> names;
  for (const LocalBackendInfo& info : local_backends()) {
    if (info.device != "cuda") names.emplace_back(info.name);
  }
  return names;
}

// Limits of the errors against the size of what is added up; of lse: absolute.
struct Accuracy {
  at::ScalarType dtype;
  double out, grad, lse;
};
// 16-bit results are rounded once (u = 2^-8, 2^-11); inside a fused kernel P and dS are, too. The
// fused kernels' exponential costs the log-sum-exp up to 6e-5.
constexpr Accuracy kAccuracies[] = {{at::kDouble, 1e-13, 1e-13, 1e-13},
                                    {at::kFloat, 1e-6, 1e-6, 2e-5},
                                    {at::kBFloat16, 4e-3, 8e-3, 2e-3},
                                    {at::kHalf, 5e-4, 1e-3, 5e-4}};

Problem draw_problem(Draw& draw, at::ScalarType dtype) {
  const int64_t batch = draw.whole(1, 3), kv_heads = draw.whole(1, 3);
  const int64_t heads = kv_heads * draw.whole(1, 3), sq = draw.whole(1, 40), sk = draw.whole(1, 40);
  const auto dim = draw.one_of<int64_t>({1, 4, 8, 16, 20, 33});
  Problem p;
  p.q = draw.normal({batch, sq, heads, dim}, dtype);
  p.k = draw.normal({batch, sk, kv_heads, dim}, dtype);
  p.v = draw.normal({batch, sk, kv_heads, dim}, dtype);
  p.dout = draw.normal({batch, sq, heads, dim}, dtype);
  p.scale = 1 / std::sqrt(static_cast<double>(dim));
  if (draw.whole(0, 2) > 0) p.mask = draw.mask(batch, sk, draw.one_of<double>({0.1, 0.6}));
  return p;
}

std::string describe(const std::string& backend, const Problem& p) {
  return fmt::format("{} {} q {} k {} mask {}", backend, c10::toString(p.q.scalar_type()),
                     c10::str(p.q.sizes()), c10::str(p.k.sizes()),
                     p.mask.defined() ? c10::str(p.mask.sum(1)) : "none");
}

struct Computed {
  AttentionOutput forward;
  AttentionGradients grads;
};

Computed compute(const std::string& backend, const Problem& p) {
  const auto local = make_local_attention(backend, at::kCPU, p.q.scalar_type(), p.mask.defined());
  const AttentionOutput f = local->forward(p.q, p.k, p.v, p.mask, p.scale);
  return {f, local->backward(p.dout, p.q, p.k, p.v, f.out, f.lse, p.mask, p.scale)};
}

void check_close(const Computed& c, const Solution& s, const Accuracy& limit) {
  CHECK(error(c.forward.out, s.out, s.out_abs) <= limit.out);
  CHECK(max_abs(c.forward.lse, s.lse) <= limit.lse);
  CHECK(error(c.grads.dq, s.dq, s.dq_abs) <= limit.grad);
  CHECK(error(c.grads.dk, s.dk, s.dk_abs) <= limit.grad);
  CHECK(error(c.grads.dv, s.dv, s.dv_abs) <= limit.grad);
}

void check_types(const Computed& c, const Problem& p) {
  const at::ScalarType dtype = p.q.scalar_type();
  CHECK(c.forward.out.scalar_type() == dtype);
  CHECK(c.forward.lse.scalar_type() == accumulate_type(dtype));
  for (const Tensor& grad : {c.grads.dq, c.grads.dk, c.grads.dv}) {
    CHECK(grad.scalar_type() == dtype);
  }
}

// What no key can reach must be exact: the merging of blocks relies on it.
void check_unseen(const Computed& c, const Problem& p) {
  if (!p.mask.defined()) return;
  for (int64_t b = 0; b < p.q.size(0); ++b) {
    const Tensor hidden = p.mask[b].logical_not().view({-1, 1, 1});
    CHECK(all_zero(c.grads.dk[b].masked_select(hidden)));
    CHECK(all_zero(c.grads.dv[b].masked_select(hidden)));
    if (p.mask[b].any().item<bool>()) continue;
    CHECK(all_zero(c.forward.out[b]));
    CHECK(c.forward.lse[b].eq(-kInf).all().item<bool>());
    CHECK(all_zero(c.grads.dq[b]));
  }
}

TEST_CASE("local attention: each CPU backend agrees with the oracle", "[attention][local]") {
  at::set_num_threads(1);
  REQUIRE(cpu_backends() == std::vector<std::string>{"math", "cpu_flash"});
  for (const std::string& backend : cpu_backends()) {
    for (const Accuracy& accuracy : kAccuracies) {
      int unseen = 0, grouped = 0;
      for (uint64_t seed = 1; seed <= 60; ++seed) {
        Draw draw(seed);
        const Problem p = draw_problem(draw, accuracy.dtype);
        INFO("seed " << seed << ", " << describe(backend, p));
        const Computed c = compute(backend, p);
        check_types(c, p);
        check_close(c, solve(p), accuracy);
        check_unseen(c, p);
        unseen += p.mask.defined() && !p.mask.any(1).all().item<bool>();
        grouped += p.q.size(2) != p.k.size(2);
      }
      CHECK(unseen >= 5);  // the draw holds what the test is about
      CHECK(grouped >= 10);
    }
  }
}

// Fused kernels walk over keys in tiles (512 in LibTorch's CPU kernel): a first tile without a
// valid key leaves a running maximum of -inf.
TEST_CASE("local attention: whole tiles of masked keys", "[attention][local]") {
  at::set_num_threads(1);
  for (const std::string& backend : cpu_backends()) {
    for (const Accuracy& accuracy : kAccuracies) {
      for (const int64_t hidden_from : {0, 600}) {
        Draw draw(7);
        Problem p;
        p.q = draw.normal({2, 5, 2, 8}, accuracy.dtype);
        p.k = draw.normal({2, 1300, 1, 8}, accuracy.dtype);
        p.v = draw.normal({2, 1300, 1, 8}, accuracy.dtype);
        p.dout = draw.normal({2, 5, 2, 8}, accuracy.dtype);
        p.scale = 0.35;
        p.mask = at::ones({2, 1300}, at::kBool);
        p.mask.narrow(1, hidden_from, 700).fill_(false);
        p.mask[1].fill_(false);
        INFO(describe(backend, p) << ", 700 keys hidden from " << hidden_from);
        const Computed c = compute(backend, p);
        check_close(c, solve(p), accuracy);
        check_unseen(c, p);
      }
    }
  }
}

TEST_CASE("local attention: what masked keys hold does not matter", "[attention][local]") {
  at::set_num_threads(1);
  for (const std::string& backend : cpu_backends()) {
    for (const Accuracy& accuracy : kAccuracies) {
      Draw draw(11);
      Problem p = draw_problem(draw, accuracy.dtype);
      p.mask = draw.mask(p.q.size(0), p.k.size(1), 0.5);
      const Tensor hidden = p.mask.logical_not().unsqueeze(-1).unsqueeze(-1);
      const Computed clean = compute(backend, p);
      p.k = p.k.masked_fill(hidden, 1e4), p.v = p.v.masked_fill(hidden, -1e4);
      const Computed poisoned = compute(backend, p);
      INFO(describe(backend, p));
      CHECK(at::equal(clean.forward.out, poisoned.forward.out));
      CHECK(at::equal(clean.forward.lse, poisoned.forward.lse));
      CHECK(at::equal(clean.grads.dq, poisoned.grads.dq));
      CHECK(at::equal(clean.grads.dk, poisoned.grads.dk));
      CHECK(at::equal(clean.grads.dv, poisoned.grads.dv));
    }
  }
}

// The same values in other memory.
struct Layout {
  const char* name;
  Tensor (*lay_out)(const Tensor&);
};
const Layout kLayouts[] = {
    {"heads first", [](const Tensor& x) { return x.transpose(1, 2).contiguous().transpose(1, 2); }},
    {"batch innermost but one",
     [](const Tensor& x) { return x.transpose(0, 1).contiguous().transpose(0, 1); }},
    {"part of a packed tensor",
     [](const Tensor& x) {
       return at::stack({x, x + 1}, 2).select(2, 0);
     }},
    {"part of a longer sequence",
     [](const Tensor& x) {
       return at::cat({x + 1, x, x + 1}, 1).narrow(1, x.size(1), x.size(1));
     }},
    {"every second channel",
     [](const Tensor& x) {
       return at::stack({x, x + 1}, -1).select(-1, 0);
     }},
    {"channels first",
     [](const Tensor& x) {
       return x.permute({3, 0, 1, 2}).contiguous().permute({1, 2, 3, 0});
     }},
};

TEST_CASE("local attention: strides are free", "[attention][local]") {
  at::set_num_threads(1);
  for (const std::string& backend : cpu_backends()) {
    for (const Accuracy& accuracy : kAccuracies) {
      for (const Layout& layout : kLayouts) {
        for (const uint64_t seed : {3, 4, 5}) {
          Draw draw(seed);
          Problem p = draw_problem(draw, accuracy.dtype);
          const Solution s = solve(p);
          const auto local =
              make_local_attention(backend, at::kCPU, accuracy.dtype, p.mask.defined());
          p.q = layout.lay_out(p.q), p.k = layout.lay_out(p.k), p.v = layout.lay_out(p.v);
          p.dout = layout.lay_out(p.dout);
          if (p.mask.defined())
            p.mask = at::stack({p.mask, p.mask.logical_not()}, -1).select(-1, 0);
          INFO(layout.name << ", seed " << seed << ", " << describe(backend, p));
          Computed c;
          c.forward = local->forward(p.q, p.k, p.v, p.mask, p.scale);
          c.grads = local->backward(p.dout, p.q, p.k, p.v, layout.lay_out(c.forward.out),
                                    layout.lay_out(c.forward.lse.unsqueeze(-1)).squeeze(-1), p.mask,
                                    p.scale);
          check_close(c, s, accuracy);
        }
      }
      // What sum().backward() hands down: one number for all elements.
      Draw draw(6);
      Problem p = draw_problem(draw, accuracy.dtype);
      p.dout = at::ones({}, p.q.options()).expand_as(p.q);
      INFO("expanded dout, " << describe(backend, p));
      check_close(compute(backend, p), solve(p), accuracy);
    }
  }
}

// Each block of keys alone, with the out and lse of all blocks: the shares add up to the gradients.
TEST_CASE("local attention: backward over blocks of keys", "[attention][local]") {
  at::set_num_threads(1);
  for (const std::string& backend : cpu_backends()) {
    for (const Accuracy& accuracy : kAccuracies) {
      for (uint64_t seed = 1; seed <= 15; ++seed) {
        Draw draw(seed);
        Problem p = draw_problem(draw, accuracy.dtype);
        const int64_t sk = p.k.size(1), cut = draw.whole(0, sk);
        if (p.mask.defined()) p.mask[0].narrow(0, 0, cut).fill_(false);  // sample 0: an empty block
        INFO("seed " << seed << ", cut " << cut << ", " << describe(backend, p));
        const Solution s = solve(p);
        const auto local =
            make_local_attention(backend, at::kCPU, accuracy.dtype, p.mask.defined());
        const Tensor out = s.out.to(accuracy.dtype);
        const Tensor lse = s.lse.to(accumulate_type(accuracy.dtype));
        Tensor dq = at::zeros_like(s.dq);
        std::vector<Tensor> dk, dv;
        for (const auto& [begin, end] : {std::pair(int64_t{0}, cut), std::pair(cut, sk)}) {
          const auto keys = [&, b = begin, e = end](const Tensor& x) {
            return x.defined() ? x.narrow(1, b, e - b) : x;
          };
          const AttentionGradients g =
              local->backward(p.dout, p.q, keys(p.k), keys(p.v), out, lse, keys(p.mask), p.scale);
          dq += g.dq.to(at::kDouble);
          dk.push_back(g.dk), dv.push_back(g.dv);
        }
        const Computed c{{out, lse}, {dq, at::cat(dk, 1), at::cat(dv, 1)}};
        // `out` is rounded to the dtype once more than within one backend.
        Accuracy limit = accuracy;
        limit.grad *= 1.5;
        check_close(c, s, limit);
      }
    }
  }
}

TEST_CASE("local attention: zero-sized tensors", "[attention][local]") {
  struct Shape {
    int64_t batch, sq, sk, heads, kv_heads;
  };
  for (const std::string& backend : cpu_backends()) {
    for (const Accuracy& accuracy : kAccuracies) {
      for (const Shape& shape : {Shape{0, 3, 4, 2, 2}, Shape{2, 0, 4, 2, 1}, Shape{2, 3, 0, 2, 1},
                                 Shape{2, 0, 0, 2, 2}, Shape{2, 3, 4, 0, 1}}) {
        for (const bool masked : {false, true}) {
          const auto make = [&](int64_t tokens, int64_t heads) {
            return at::ones({shape.batch, tokens, heads, 8}, accuracy.dtype);
          };
          Problem p{make(shape.sq, shape.heads),
                    make(shape.sk, shape.kv_heads),
                    make(shape.sk, shape.kv_heads),
                    make(shape.sq, shape.heads),
                    {},
                    0.5};
          if (masked) p.mask = at::ones({shape.batch, shape.sk}, at::kBool);
          INFO(describe(backend, p));
          const Computed c = compute(backend, p);
          check_types(c, p);
          CHECK(c.forward.out.sizes().vec() == p.q.sizes().vec());
          CHECK(all_zero(c.forward.out));
          CHECK(c.forward.lse.sizes().vec() ==
                std::vector<int64_t>{shape.batch, shape.heads, shape.sq});
          CHECK(c.forward.lse.eq(-kInf).all().item<bool>());
          CHECK(c.grads.dq.sizes().vec() == p.q.sizes().vec());
          CHECK(c.grads.dk.sizes().vec() == p.k.sizes().vec());
          CHECK(c.grads.dv.sizes().vec() == p.v.sizes().vec());
          for (const Tensor& grad : {c.grads.dq, c.grads.dk, c.grads.dv}) CHECK(all_zero(grad));
        }
      }
    }
  }
}

TEST_CASE("local attention: inputs are left as they are", "[attention][local]") {
  for (const std::string& backend : cpu_backends()) {
    Draw draw(9);
    Problem p = draw_problem(draw, at::kFloat);
    p.mask = draw.mask(p.q.size(0), p.k.size(1), 0.5);
    const Problem before{p.q.clone(), p.k.clone(), p.v.clone(), p.dout.clone(), p.mask.clone(), 1};
    compute(backend, p);
    CHECK(at::equal(p.q, before.q));
    CHECK(at::equal(p.k, before.k));
    CHECK(at::equal(p.v, before.v));
    CHECK(at::equal(p.dout, before.dout));
    CHECK(at::equal(p.mask, before.mask));
  }
}

std::string refusal(const char* name, at::Device device, at::ScalarType dtype, bool masked) {
  return error_text([&] { make_local_attention(name, device, dtype, masked); });
}

TEST_CASE("local attention: what a backend cannot do is refused", "[attention][local]") {
  const std::string unknown = refusal("flash9", at::kCPU, at::kFloat, false);
  CHECK(contains(unknown, "'flash9'"));
  for (const char* name : {"auto", "math", "cpu_flash", "cuda_flash", "cudnn", "efficient"}) {
    CHECK(contains(unknown, name));
  }

  const std::string device = refusal("cudnn", at::kCPU, at::kBFloat16, false);
  CHECK(contains(device, "'cudnn' runs on cuda"));
  CHECK(contains(device, "choose one of: math, cpu_flash"));
  CHECK(!contains(device, "efficient"));
  CHECK(contains(refusal("cpu_flash", at::kCUDA, at::kBFloat16, false),
                 "'cpu_flash' runs on cpu; on cuda choose one of: math, cuda_flash, cudnn, "
                 "efficient"));

  const std::string mask = refusal("cuda_flash", at::kCUDA, at::kBFloat16, true);
  CHECK(contains(mask, "'cuda_flash' takes no mask; choose one of: math, cudnn, efficient"));
  CHECK(make_local_attention("cuda_flash", at::kCUDA, at::kBFloat16, false)->name() ==
        "cuda_flash");

  CHECK(contains(refusal("cudnn", at::kCUDA, at::kFloat, false),
                 "'cudnn' does not compute in Float; choose one of: math, efficient"));
  CHECK(contains(refusal("efficient", at::kCUDA, at::kDouble, true),
                 "'efficient' does not compute in Double; choose one of: math"));
}

TEST_CASE("local attention: dtypes that no backend computes in are refused", "[attention][local]") {
  for (const char* name : {"auto", "math", "cpu_flash"}) {
    for (const at::ScalarType dtype : {at::kLong, at::kBool, at::kComplexFloat}) {
      const std::string text = refusal(name, at::kCPU, dtype, false);
      CHECK(contains(text, c10::toString(dtype)));
      CHECK(contains(text, "BFloat16"));  // says what can be computed in
    }
  }
}

TEST_CASE("local attention: 'auto' chooses by device and dtype", "[attention][local]") {
  const auto chosen = [](at::Device device, at::ScalarType dtype, bool masked) {
    return make_local_attention("auto", device, dtype, masked)->name();
  };
  for (const bool masked : {false, true}) {
    for (const Accuracy& accuracy : kAccuracies) {
      CHECK(chosen(at::kCPU, accuracy.dtype, masked) == "cpu_flash");
    }
    CHECK(chosen(at::kCUDA, at::kBFloat16, masked) == "cudnn");
    CHECK(chosen(at::kCUDA, at::kHalf, masked) == "cudnn");
    CHECK(chosen(at::kCUDA, at::kFloat, masked) == "math");
    CHECK(chosen(at::kCUDA, at::kDouble, masked) == "math");
  }
}

TEST_CASE("local attention: partial results are kept in fp32 or better", "[attention][local]") {
  CHECK(accumulate_type(at::kDouble) == at::kDouble);
  CHECK(accumulate_type(at::kFloat) == at::kFloat);
  CHECK(accumulate_type(at::kBFloat16) == at::kFloat);
  CHECK(accumulate_type(at::kHalf) == at::kFloat);
}

}  // namespace
}  // namespace shardproof::attention
