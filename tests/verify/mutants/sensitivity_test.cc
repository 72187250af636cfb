// How small an error the checks see, over random correct cases.
#include "verify/mutants/sensitivity.h"

#include <ATen/ATen.h>

#include <nlohmann/json.hpp>

#include "tests/catch.h"
#include "verify/attention/attention_check.h"
#include "verify/models/model_check.h"
#include "verify/mutants/altered_context.h"
#include "verify/mutants/planting.h"
#include "verify/mutants/sensitivity_report.h"
#include "verify/suites/attention_suite.h"

namespace shardproof::verify {
namespace {

using at::Tensor;

constexpr int64_t kSeeds = 120;

ScopePower only(const PowerRun& run) {
  REQUIRE(run.scopes.size() == 1);
  return run.scopes[0];
}

ScopePower measured(Scope scope, c10::ScalarType dtype) {
  PowerOptions options;
  options.seeds = kSeeds;
  options.scopes = {scope};
  options.dtypes = {dtype};
  const PowerRun run = measure_power(options);
  CHECK(run.holds());
  return only(run);
}

TEST_CASE("power: a common factor of all gradients is seen", "[sensitivity]") {
  // In 16 bits the wish was 5e-3. The ratio's limit does not reach it: it holds the floor, 0.2 u
  // |magnitude| / |oracle|, undivided (docs/checks.md). The factor here is what is reached.
  const std::vector<std::pair<c10::ScalarType, double>> factors = {
      {at::kDouble, 1e-10}, {at::kFloat, 1e-4}, {at::kBFloat16, 2e-2}};
  for (const auto& [dtype, factor] : factors) {
    const ScopePower power = measured(Scope::kAllGradients, dtype);
    CAPTURE(c10::toString(dtype), size_text(power.ours.smallest()));
    REQUIRE(power.ours.cases >= 100);
    REQUIRE(power.ours.smallest());
    CHECK(*power.ours.smallest() <= factor);
  }
}

TEST_CASE("power: bit by bit, a common factor shows in 16 bits too", "[sensitivity]") {
  for (const c10::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    PowerOptions options;
    options.seeds = 12;
    options.scopes = {Scope::kMatchedGradients};
    options.dtypes = {dtype};
    const PowerRun run = measure_power(options);
    CHECK(run.holds());
    const ScopePower power = only(run);
    CAPTURE(c10::toString(dtype), size_text(power.ours.smallest()));
    CHECK(power.ours.cases == 12);
    CHECK(power.bitwise == 12);
    REQUIRE(power.ours.smallest());
    CHECK(*power.ours.smallest() <= 5e-3);
  }
  // The same where the factor is really planted: in the loss of every rank.
  WorldPool worlds(sim::WorldOptions{});
  TrainingSubject subject;
  subject.edit_loss = [](const Tensor& loss, const TrainingSubject::LossPlace&) {
    return loss * (1 + 5e-3);
  };
  for (const char* id :
       {"training/qwenimage/ulysses/dp2.ring1.ulysses2.fsdp4/bf16/b1.t6.g1x4x4.l1.h4.d12.s1.sgd#1",
        "training/wan/ring/dp1.ring2.ulysses1.fsdp2/bf16/b1.t6.g2x3x4.l1.h4.d12.s1.sgd#2",
        "training/flux/hybrid_allgather/dp1.ring2.ulysses2.fsdp4/bf16/"
        "b1.t6.g1x4x4.l1.h4.d16.s1.sgd#3"}) {
    const TrainingCase c = TrainingCase::parse(id);
    CAPTURE(id);
    CHECK(check_training(c, {}, worlds, TrainingReference::kMatched).status == Status::kPass);
    CHECK(check_training(c, subject, worlds, TrainingReference::kMatched).status == Status::kFail);
  }
}

TEST_CASE("power: halving finds what asking at every size finds", "[sensitivity]") {
  WorldPool worlds(sim::WorldOptions{});
  const std::vector<double> sizes = error_sizes();
  CHECK(sizes.size() == 65);
  CHECK(sizes.back() == 1);
  int lines = 0;
  for (const AttentionCase& c : random_attention_cases({}, 11, 12)) {
    const StoredCase stored = store_case(c, worlds);
    REQUIRE(stored.tensors.size() == 5);
    for (const Scope scope : all_scopes()) {
      if (scope >= Scope::kModelGradients) continue;
      const auto line = error_line(c, stored, scope);
      if (!line) continue;
      ++lines;
      const auto caught = [&](double size) { return stored.caught(*line, size); };
      const size_t first = first_caught(sizes, caught);
      CHECK_FALSE(caught(0));
      for (size_t i = 0; i < sizes.size(); ++i) CHECK(caught(sizes[i]) == (i >= first));
    }
  }
  CHECK(lines > 50);
}

TEST_CASE("power: judging again says what the run said, of us and of published tests",
          "[sensitivity]") {
  WorldPool worlds(sim::WorldOptions{});
  for (const AttentionCase& c : random_attention_cases({}, 12, 8)) {
    PeerTests peers(PeerLevel::kAttention, c.dtype, c.mesh.world());
    AttentionSubject subject;
    subject.observe = peers.observer();
    check_attention(c, subject, worlds);
    const StoredCase stored = store_case(c, worlds);
    CHECK(stored.result.status == Status::kPass);
    const auto then = peers.judge(), now = stored.peers({}, 0);
    REQUIRE(then.size() == now.size());
    for (size_t i = 0; i < then.size(); ++i) {
      CHECK(then[i].accepts == now[i].accepts);
      CHECK(then[i].evidence == now[i].evidence);
    }
  }
}

// A run whose attention sets one head to zero, in the first call on one rank.
ModelSubject one_head_zeroed(int64_t head) {
  return in_context<ModelSubject>([head](AlteredContext& context, int rank) {
    if (rank != 0) return;
    const auto calls = std::make_shared<int>(0);
    context.wrap_attention = [=](const models::JointAttention& right) {
      return [=](const std::vector<attention::StreamQkv>& streams, const Tensor& mask) {
        attention::SequenceParallelOutput out = right(streams, mask);
        if ((*calls)++ > 0) return out;
        for (Tensor& stream : out.streams) {
          const Tensor keep = at::ones({stream.size(2), 1}, stream.options());
          keep[head].zero_();
          stream = stream * keep;
        }
        return out;
      };
    };
  });
}

TEST_CASE("power: one head that is zero in one layer on one rank is seen in bf16",
          "[sensitivity]") {
  WorldPool worlds(sim::WorldOptions{});
  int caught = 0;
  for (int64_t i = 0; i < kSeeds; ++i) {
    const char* mesh = i % 2 ? "dp1.ring1.ulysses2" : "dp1.ring2.ulysses1";
    ModelCase c = ModelCase::parse(case_id(ModelSpot{mesh}, at::kBFloat16));
    c.layers = 2;
    c.seed = 100 + static_cast<uint64_t>(i);
    const CaseResult result = check_model(c, one_head_zeroed(i % c.heads), worlds);
    caught += result.status == Status::kFail && result.first_wrong.starts_with("block.0.");
  }
  CHECK(caught == kSeeds);
}

TEST_CASE("power: the report counts, and bounds the rate of false alarms", "[sensitivity]") {
  PowerOptions options;
  options.seeds = 2;
  options.correct = 40;
  const PowerRun run = measure_power(options);
  CHECK(run.holds());
  CHECK(run.scopes.size() == 4 * all_scopes().size());
  CHECK(run.alarms.size() == 4);
  const auto json = nlohmann::json::parse(power_to_json(run, {}));
  CHECK(json.at("format") == "shardproof-power");
  CHECK(json.at("curves").size() == run.scopes.size());
  CHECK(json.at("correct").at(0).at("cases") == 48);  // 4 dtypes x 2, and 40
  CHECK(json.at("correct").at(0).at("upper_bound") > 0.05);
  CHECK(power_to_terminal(run, false).find("fewer than 1 in") != std::string::npos);
  const std::string page = power_to_html(run, {});
  CHECK(page.find("class=\"ours\"") != std::string::npos);
  CHECK(page.find("http") == std::string::npos);  // self-contained
}

TEST_CASE("power: sharpest and bluntest of published tests", "[sensitivity]") {
  const auto curve = [](int at) {
    PowerCurve c;
    c.cases = 1;
    for (int i = 0; i < 65; ++i) c.caught.push_back(i >= at);
    return c;
  };
  ScopePower scope;
  scope.peers = {
      {"never", curve(65)}, {"sharp", curve(20)}, {"middle", curve(30)}, {"refuses", {}}};
  const PeerRange range = peer_range(scope);
  CHECK(range.sharpest == "sharp");
  CHECK(range.smallest == error_sizes()[20]);
  CHECK(range.bluntest == "never");
  CHECK_FALSE(range.largest);
  CHECK(peer_range({}).sharpest.empty());
}

}  // namespace
}  // namespace shardproof::verify
