#include "verify/peers/peer_tests.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "models/transformer.h"

namespace shardproof::verify {
namespace {

using at::Tensor;
using Sample = PeerTests::Sample;

// How far a tensor is from being refused: above 1 it is. NaN counts as refused.
using Criterion = std::function<double(const Sample&, int ranks)>;

double finite_or_refused(double x) {
  return std::isnan(x) ? std::numeric_limits<double>::infinity() : x;
}

// torch.testing.assert_close: |result - reference| <= atol + rtol |reference|, each element.
Criterion elementwise(double atol, double rtol, bool atol_times_ranks = false) {
  return [=](const Sample& x, int ranks) {
    const double absolute = atol_times_ranks ? atol * ranks : atol;
    const Tensor allowed = x.reference.abs() * rtol + absolute;
    return finite_or_refused(((x.result - x.reference).abs() / allowed).max().item<double>());
  };
}

double relative_l2(const Tensor& x, const Tensor& truth) {
  const double error = (x - truth).norm().item<double>(), norm = truth.norm().item<double>();
  return norm > 0 ? error / norm : error > 0 ? std::numeric_limits<double>::infinity() : 0;
}

Criterion relative(double limit) {
  return [=](const Sample& x, int) {
    return finite_or_refused(relative_l2(x.result, x.reference) / limit);
  };
}

Criterion finite() {
  return [](const Sample& x, int) {
    return x.result.isfinite().all().item<bool>() ? 0 : std::numeric_limits<double>::infinity();
  };
}

// vllm-omni: largest difference below 1e-4, or relative to the largest value below 1e-2.
Criterion absolute_or_relative(double absolute, double relative_to_largest) {
  return [=](const Sample& x, int) {
    const double difference = (x.result - x.reference).abs().max().item<double>();
    const double largest = x.reference.abs().max().item<double>();
    return finite_or_refused(
        std::min(difference / absolute, difference / (largest * relative_to_largest)));
  };
}

// MagiAttention: no further from fp64 than `times` the low-precision reference.
Criterion times_reference(double times) {
  return [=](const Sample& x, int) {
    return finite_or_refused(relative_l2(x.result, x.oracle) /
                             (times * relative_l2(x.reference, x.oracle)));
  };
}

Criterion none() { return {}; }

struct PeerTest {
  const char* name;
  std::vector<at::ScalarType> dtypes;
  bool of_attention;  // not of whole models
  Criterion output, gradient, loss;
  double norm_tolerance = 0;  // atol = rtol of the norm of all gradients; 0: not compared
};

// Facts of the tests' sources; those that assert nothing are not listed.
const std::vector<PeerTest>& peer_tests() {
  constexpr auto kB = at::kBFloat16, kH = at::kHalf, kF = at::kFloat, kD = at::kDouble;
  static const std::vector<PeerTest> tests = {
      {"PyTorch context parallel",
       {kB},
       true,
       elementwise(1e-3, 1e-5, true),
       elementwise(8e-3, 1e-5, true),
       none()},
      {"TransformerEngine",
       {kB},
       true,
       elementwise(2.5e-2, 2.5e-2),
       elementwise(2.5e-2, 2.5e-2),
       none()},
      {"TransformerEngine fp16",
       {kH},
       true,
       elementwise(5e-3, 5e-3),
       elementwise(5e-3, 5e-3),
       none()},
      {"yunchang", {kB}, true, elementwise(1e-1, 0), none(), none()},
      {"Megatron-LM attention",
       {kB},
       true,
       elementwise(1e-2, 1e-2),
       elementwise(1e-2, 1e-2),
       none()},
      {"MagiAttention", {kB, kH}, true, times_reference(2), times_reference(2), none()},
      {"MagiAttention fp64", {kD}, true, elementwise(1e-8, 1e-8), elementwise(1e-8, 1e-8), none()},
      {"diffusers backend parity", {kB}, true, relative(2e-2), relative(2e-2), none()},
      {"diffusers model test", {kF}, false, elementwise(1e-4, 1e-4), finite(), none()},
      {"vllm-omni", {kB, kH}, false, absolute_or_relative(1e-4, 1e-2), none(), none()},
      {"FastVideo", {kF}, false, none(), elementwise(1e-4, 1e-4), none()},
      {"verl-omni Ulysses forward", {kB}, false, elementwise(1e-2, 1e-2), none(), none()},
      {"verl-omni Ulysses forward+backward",
       {kB},
       false,
       none(),
       none(),
       elementwise(3e-5, 1e-2),
       1e-2},
      {"VeOmni FSDP", {kB}, false, none(), none(), none(), 1e-1},
  };
  return tests;
}

bool is_gradient(const Sample& x) { return x.name.ends_with(":grad"); }

const Criterion& criterion_for(const PeerTest& test, const Sample& x) {
  return is_gradient(x) ? test.gradient : x.name == "loss" ? test.loss : test.output;
}

// Takes the worst of what a test compares.
class Comparison {
 public:
  void take(double quotient, const std::string& what) {
    compared_ = true;
    if (quotient < worst_) return;
    worst_ = quotient;
    what_ = what;
  }
  bool compared() const { return compared_; }
  PeerVerdict verdict(const char* test) const {
    return {test, worst_ <= 1, fmt::format("{} at {:.3g} of the tolerance", what_, worst_)};
  }

 private:
  bool compared_ = false;
  double worst_ = 0;
  std::string what_;
};

double gradient_norm(const std::vector<Sample>& samples, Tensor Sample::*side) {
  double squares = 0;
  for (const Sample& x : samples) {
    if (is_gradient(x)) squares += (x.*side).square().sum().item<double>();
  }
  return std::sqrt(squares);
}

}  // namespace

void PeerTests::add(const std::string& name, const Tensor& result, const Tensor& reference,
                    const Tensor& oracle) {
  constexpr std::string_view kStep = "step0/";  // tests compare one step
  const std::string plain = name.starts_with(kStep) ? name.substr(kStep.size()) : name;
  if (plain.find('/') != std::string::npos) return;
  if (plain != "output" && plain != "loss" && !plain.ends_with(":grad")) return;
  // Of a model, published tests compare the gradients of parameters.
  const std::string of = plain.substr(0, plain.rfind(':'));
  if (level_ == PeerLevel::kModel && models::TransformerInputs::is_name(of)) return;
  const auto wide = [](const Tensor& x) { return x.to(at::kCPU, at::kDouble); };
  samples_.push_back({plain, wide(result), wide(reference), wide(oracle)});
}

void PeerTests::add(const Judged& tensor) {
  const at::ArrayRef<double> oracle(tensor.oracle.data(), tensor.oracle.size());
  add(tensor.name, tensor.result, tensor.reference, at::tensor(oracle).view(tensor.result.sizes()));
}

std::vector<PeerVerdict> PeerTests::judge() const {
  std::vector<PeerVerdict> verdicts;
  for (const PeerTest& test : peer_tests()) {
    const auto& dtypes = test.dtypes;
    if (std::find(dtypes.begin(), dtypes.end(), dtype_) == dtypes.end()) continue;
    if (test.of_attention && level_ == PeerLevel::kModel) continue;
    Comparison comparison;
    for (const Sample& x : samples_) {
      if (const Criterion& criterion = criterion_for(test, x)) {
        comparison.take(criterion(x, ranks_), x.name);
      }
    }
    const bool gradients = std::any_of(samples_.begin(), samples_.end(), is_gradient);
    if (test.norm_tolerance > 0 && gradients) {
      const double norm = gradient_norm(samples_, &Sample::result);
      const double expected = gradient_norm(samples_, &Sample::reference);
      comparison.take(
          finite_or_refused(std::abs(norm - expected) / (test.norm_tolerance * (1 + expected))),
          fmt::format("gradient norm {:.5g} beside {:.5g}", norm, expected));
    }
    if (comparison.compared()) verdicts.push_back(comparison.verdict(test.name));
  }
  return verdicts;
}

std::vector<std::string> peer_names() {
  std::vector<std::string> names;
  for (const PeerTest& test : peer_tests()) names.emplace_back(test.name);
  return names;
}

}  // namespace shardproof::verify
