// A model's plan is carried out to the letter, and what does not fit it is an error.
#include "tests/catch.h"

#include <ATen/ATen.h>

#include "models/parallel.h"
#include "sim/world.h"
#include "tests/file_support.h"

namespace shardproof::models {
namespace {

using at::Tensor;
using tests::contains;
using tests::error_text;

const plan::ModelPlan kRules = {
    {"", "hidden_states", plan::TensorUse::kSplit, "image", 3, 1},
    {"pos_embed", "rope", plan::TensorUse::kSplit, "image", 2, 0},
    {"proj_out", "output", plan::TensorUse::kGather, "image", 3, 1},
    {"", "timestep", plan::TensorUse::kWhole},
};

// Runs `body` with a Sharding of 13 image tokens over `sp` simulated ranks.
void on_ranks(int sp, plan::TokenSplit split,
              const std::function<void(Sharding&, int rank)>& body) {
  sim::World world(sp);
  world.run([&](sim::RankContext& rank) {
    const comm::Mesh mesh(rank, {1, 1, sp});
    ParallelOptions options;
    options.token_split = split;
    options.head_split = plan::HeadSplit::kPadded;
    const MeshContext parallel(mesh, options);
    const plan::AttentionPlan attention = parallel.plan({{"image", 13}}, 4);
    Sharding sharding(kRules, attention, parallel);
    body(sharding, rank.rank());
  });
}

Tensor tokens(int64_t count) {
  return at::arange(count, at::kDouble).view({1, count, 1}).expand({2, count, 3});
}

void expect(bool condition) {
  if (!condition) throw std::runtime_error("not as expected");
}

TEST_CASE("sharding: ranks hold [5,4,4] tokens and gather them again", "[models]") {
  on_ranks(3, plan::TokenSplit::kUneven, [](Sharding& sharding, int rank) {
    const Tensor own = sharding.split("hidden_states", tokens(13));
    expect(own.size(1) == (rank == 0 ? 5 : 4));
    expect(own[0][0][0].item<double>() == (rank == 0 ? 0 : 1 + 4 * rank));
    expect(at::equal(sharding.gather("output", own), tokens(13)));
  });
}

TEST_CASE("sharding: padded shards end in zeros that no gather brings back", "[models]") {
  on_ranks(3, plan::TokenSplit::kPadded, [](Sharding& sharding, int rank) {
    const Tensor own = sharding.split("hidden_states", tokens(13) + 1);
    expect(own.size(1) == 5);
    if (rank == 2) expect(own.narrow(1, 3, 2).abs().sum().item<double>() == 0);
    expect(at::equal(sharding.gather("output", own), tokens(13) + 1));
  });
}

// One rank, no world: what is wrong with a call.
std::string problem(
    const std::function<void(const ParallelContext&, const plan::AttentionPlan&)>& f,
    ErrorKind kind = ErrorKind::kBadInput) {
  SingleRank single(at::kCPU);
  const comm::Mesh mesh(single, {});
  const MeshContext parallel(mesh, {});
  const plan::AttentionPlan attention = parallel.plan({{"image", 13}}, 4);
  return error_text([&] { f(parallel, attention); }, kind);
}

TEST_CASE("sharding: tensors of another rank or length are errors", "[models]") {
  const auto split = [](const Tensor& x) {
    return problem([&](const auto& parallel, const auto& attention) {
      Sharding(kRules, attention, parallel).split("hidden_states", x);
    });
  };
  CHECK(contains(split(at::zeros({13, 3})),
                 "hidden_states: expected 3 dimensions with the 13 tokens of stream 'image' along "
                 "dimension 1; got shape [13, 3]"));
  CHECK(contains(split(tokens(12)), "got shape [2, 12, 3]"));
}

TEST_CASE("sharding: a rule that was not carried out is an error", "[models]") {
  const std::string text = problem(
      [](const auto& parallel, const auto& attention) {
        Sharding sharding(kRules, attention, parallel);
        sharding.split("hidden_states", tokens(13));
        sharding.gather("output", tokens(13));
        sharding.finish();
      },
      ErrorKind::kInternal);
  CHECK(contains(text, "did not carry out its plan for 'rope'"));
}

TEST_CASE("sharding: a tensor is used as its rule says", "[models]") {
  const std::string text = problem(
      [](const auto& parallel, const auto& attention) {
        Sharding(kRules, attention, parallel).split("output", tokens(13));
      },
      ErrorKind::kInternal);
  CHECK(contains(text, "no such rule for 'output'"));
}

}  // namespace
}  // namespace shardproof::models
