// The published criteria, on numbers that were made for them.
#include "verify/peers/peer_tests.h"

#include <ATen/ATen.h>

#include <map>

#include "tests/catch.h"
#include "verify/training/classical_tests.h"

namespace shardproof::verify {
namespace {

using at::Tensor;

Tensor numbers(std::vector<double> values) { return at::tensor(values, at::kDouble); }

std::map<std::string, bool> accepted(const PeerTests& tests) {
  std::map<std::string, bool> verdicts;
  for (const PeerVerdict& v : tests.judge()) verdicts[v.test] = v.accepts;
  return verdicts;
}

TEST_CASE("peers: equal numbers are accepted by all, other ones as their tolerances say",
          "[peers]") {
  const Tensor truth = numbers({1, -2, 0, 4});
  PeerTests same(PeerLevel::kAttention, at::kBFloat16, 4);
  for (const char* name : {"output", "q:grad"}) same.add(name, truth, truth, truth);
  CHECK(accepted(same).size() >= 8);
  for (const auto& [test, accepts] : accepted(same)) {
    // Twice the error of a reference that has none is none.
    if (test != "MagiAttention") CHECK(accepts);
  }

  // 0.003 at the zero: within atol 1e-3 x 4 ranks, beyond it at 2 ranks.
  const Tensor off = numbers({1, -2, 0.003, 4});
  for (const int ranks : {2, 4}) {
    PeerTests tests(PeerLevel::kAttention, at::kBFloat16, ranks);
    tests.add("output", off, truth, truth);
    CHECK(accepted(tests).at("PyTorch context parallel") == (ranks == 4));
    CHECK(accepted(tests).at("yunchang"));
  }
  // Gradients times 0.9: beyond rtol 2.5e-2, within it where they are small.
  PeerTests scaled(PeerLevel::kAttention, at::kBFloat16, 4);
  scaled.add("q:grad", truth * 0.9, truth, truth);
  CHECK_FALSE(accepted(scaled).at("TransformerEngine"));
  PeerTests small(PeerLevel::kAttention, at::kBFloat16, 4);
  small.add("q:grad", truth * 0.009, truth * 0.01, truth * 0.01);
  CHECK(accepted(small).at("TransformerEngine"));
  CHECK_FALSE(accepted(small).at("diffusers backend parity"));
}

TEST_CASE("peers: a single norm does not see where gradients went", "[peers]") {
  const Tensor truth = numbers({3, 4}), swapped = numbers({4, -3});
  PeerTests tests(PeerLevel::kModel, at::kBFloat16, 4);
  tests.add("step0/loss", numbers({1}), numbers({1}), numbers({1}));
  tests.add("step0/proj.weight:grad", swapped, truth, truth);
  const auto verdicts = accepted(tests);
  CHECK(verdicts.at("verl-omni Ulysses forward+backward"));
  CHECK(verdicts.at("VeOmni FSDP"));
  CHECK_FALSE(verdicts.contains("TransformerEngine"));  // never runs a model
  // The gradient of an input is not a parameter's.
  tests.add("hidden_states:grad", truth * 100, truth, truth);
  CHECK(accepted(tests).at("verl-omni Ulysses forward+backward"));
  tests.add("norm.weight:grad", truth * 1.1, truth, truth);
  CHECK_FALSE(accepted(tests).at("verl-omni Ulysses forward+backward"));
  CHECK(accepted(tests).at("VeOmni FSDP"));
}

TEST_CASE("peers: what is not a number is refused", "[peers]") {
  const Tensor truth = numbers({1, 2}), broken = numbers({1, std::nan("")});
  PeerTests tests(PeerLevel::kModel, at::kFloat, 2);
  tests.add("output", broken, truth, truth);
  tests.add("w:grad", broken, truth, truth);
  CHECK(accepted(tests).size() >= 2);
  for (const auto& [test, accepts] : accepted(tests)) CHECK_FALSE(accepts);
}

TEST_CASE("classical tests hold, with the single number beside them", "[training]") {
  WorldPool worlds(sim::WorldOptions{});
  const auto tests = classical_tests({}, 1);
  REQUIRE(tests.size() == 6);
  for (const CasePtr& test : tests) {
    const CaseResult result = test->check(worlds);
    INFO(test->id() << ": " << result.first_wrong << result.reason);
    CHECK(result.status == Status::kPass);
    CHECK_FALSE(result.peers.empty());
    const bool backward = test->id().find("backward") != std::string::npos;
    const bool has_gradients =
        std::any_of(result.tensors.begin(), result.tensors.end(),
                    [](const TensorResult& t) { return t.name.ends_with(":grad"); });
    CHECK(has_gradients == backward);
    CHECK(find_classical_tests(test->id()).size() == 1);
  }
  CHECK(find_classical_tests("training/ulysses_forward").size() == 2);
  CHECK_THROWS(find_classical_tests("training/ulysses_backward"));
}

}  // namespace
}  // namespace shardproof::verify
