// A step is the published formula's and PyTorch's, a shard's step the whole's to the bit.
#include "fsdp/optimizer.h"

#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <array>
#include <cmath>
#include <limits>

#include "tests/file_support.h"
#include "tests/fsdp/shard_support.h"

namespace shardproof::fsdp {
namespace {

using at::Tensor;
using tests::contains;
using tests::device;
using tests::error_text;
using tests::normal;
using tests::shard_of;
using tests::to_doubles;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr std::array kLearningRates = {1e-2, 3e-2, 2e-2, 5e-3, 1e-3};

at::Generator generator(uint64_t seed) { return at::make_generator<at::CPUGeneratorImpl>(seed); }

// One number under AdamW: Loshchilov & Hutter, algorithm 2, with the learning rate as torch's docs
// have it (it scales the decay as well).
struct AdamWNumber {
  double value, exp_avg = 0, exp_avg_sq = 0;

  void step(double grad, double rate, int t, const AdamWOptions& o) {
    value -= rate * o.weight_decay * value;
    exp_avg = o.beta1 * exp_avg + (1 - o.beta1) * grad;
    exp_avg_sq = o.beta2 * exp_avg_sq + (1 - o.beta2) * grad * grad;
    const double mean = exp_avg / (1 - std::pow(o.beta1, t));
    const double variance = exp_avg_sq / (1 - std::pow(o.beta2, t));
    value -= rate * mean / (std::sqrt(variance) + o.epsilon);
  }
};

// One number under SGD: the algorithm of torch.optim.SGD's documentation, dampening 0.
struct SgdNumber {
  double value, buffer = 0;

  void step(double grad, double rate, int t, const SgdOptions& o) {
    grad += o.weight_decay * value;
    if (o.momentum != 0) {
      buffer = t == 1 ? grad : o.momentum * buffer + grad;
      grad = o.nesterov ? grad + o.momentum * buffer : buffer;
    }
    value -= rate * grad;
  }
};

// Numbers of this size are what errors are relative to: values start as N(0, 1).
double worst_error(const Tensor& got, const std::vector<double>& expected) {
  const std::vector<double> numbers = to_doubles(got);
  REQUIRE(numbers.size() == expected.size());
  double worst = 0;
  for (size_t i = 0; i < numbers.size(); ++i) {
    const double error = std::abs(numbers[i] - expected[i]) / std::max(1.0, std::abs(expected[i]));
    worst = std::isfinite(error) ? std::max(worst, error) : kNan;
  }
  return worst;
}

// After five steps: the value and, by role, the state against `Number`s that step alone.
template <class Number, class Options>
void check_formula(Optimizer& optimizer, const Options& options, at::ScalarType dtype,
                   double tolerance, const std::map<std::string, double Number::*>& roles) {
  at::Generator random = generator(21);
  const Tensor value = normal({9, 7}, dtype, random);
  std::vector<Number> numbers;
  for (const double x : to_doubles(value)) numbers.push_back({x});
  for (int t = 1; t <= 5; ++t) {
    const Tensor grad = normal({9, 7}, dtype, random) * std::pow(10.0, 2 - t);
    const double rate = kLearningRates[t - 1];
    optimizer.step({{"w", value, grad}}, rate);
    const std::vector<double> grads = to_doubles(grad);
    for (size_t i = 0; i < numbers.size(); ++i) numbers[i].step(grads[i], rate, t, options);
  }
  const auto expected = [&](double Number::*field) {
    std::vector<double> all;
    for (const Number& number : numbers) all.push_back(number.*field);
    return all;
  };
  CHECK(value.scalar_type() == dtype);
  CHECK(worst_error(value, expected(&Number::value)) <= tolerance);
  CHECK(optimizer.steps() == 5);
  REQUIRE(optimizer.state().size() == roles.size());
  for (const auto& [role, field] : roles) {
    INFO(role);
    CHECK(worst_error(optimizer.state().at(role).at("w"), expected(field)) <= tolerance);
  }
}

TEST_CASE("AdamW follows its algorithm") {
  // LibTorch's fused CUDA kernel takes 1 - beta2 in fp32, where 1 - 0.999 is off by 1.3e-5.
  const double single = device().is_cuda() ? 2e-5 : 1e-6;
  const auto [dtype, tolerance] =
      GENERATE_COPY(std::pair(at::kDouble, 1e-14), std::pair(at::kFloat, single));
  // An epsilon of the gradients' size shows where it stands, a strong decay that it is decoupled.
  const AdamWOptions options =
      GENERATE(AdamWOptions{}, AdamWOptions{0.8, 0.95, 0.1, 0.5}, AdamWOptions{0, 0.9, 1e-3, 0});
  check_formula<AdamWNumber>(
      *make_adamw(options), options, dtype, tolerance,
      {{"exp_avg", &AdamWNumber::exp_avg}, {"exp_avg_sq", &AdamWNumber::exp_avg_sq}});
}

TEST_CASE("SGD follows its algorithm") {
  const auto [dtype, tolerance] =
      GENERATE(std::pair(at::kDouble, 1e-14), std::pair(at::kFloat, 1e-6));
  const SgdOptions options = GENERATE(SgdOptions{}, SgdOptions{0, 0.5}, SgdOptions{0.9, 0},
                                      SgdOptions{0.8, 0.1}, SgdOptions{0.8, 0.1, true});
  std::map<std::string, double SgdNumber::*> roles;
  if (options.momentum != 0) roles["momentum_buffer"] = &SgdNumber::buffer;
  check_formula<SgdNumber>(*make_sgd(options), options, dtype, tolerance, roles);
}

TEST_CASE("steps of known size") {
  const Tensor value = at::ones({3}, at::kDouble).to(device());
  const Tensor grad = at::tensor({2.0, -5.0, 0.0}, at::kDouble).to(device());
  SECTION("AdamW's first step is the learning rate, whatever the gradient") {
    make_adamw({.epsilon = 1e-300, .weight_decay = 0})->step({{"w", value, grad}}, 0.25);
    CHECK(worst_error(value, {0.75, 1.25, 1}) <= 1e-15);
  }
  SECTION("AdamW decays where there is no gradient") {
    make_adamw({.weight_decay = 0.5})->step({{"w", value, at::zeros_like(value)}}, 0.25);
    CHECK(worst_error(value, {0.875, 0.875, 0.875}) <= 1e-15);
  }
  SECTION("AdamW's decay in fp32 is rounded once") {
    const Tensor x = at::full({1}, 1.4375, at::kFloat).to(device());
    make_adamw({.weight_decay = 1e-2})->step({{"w", x, at::zeros_like(x)}}, 1.3e-5);
    CHECK(x.item<float>() == static_cast<float>(1.4375 * (1 - 1.3e-7)));
  }
  SECTION("SGD's buffer starts as the first gradient") {
    const auto sgd = make_sgd({.momentum = 0.9});
    sgd->step({{"w", value, grad}}, 0.25);
    CHECK(at::equal(sgd->state().at("momentum_buffer").at("w"), grad));
    CHECK(at::equal(value.cpu(), at::tensor({0.5, 2.25, 1.0}, at::kDouble)));
  }
}

// An independent implementation: LibTorch's own classes. The difference after five steps.
template <class Torch, class TorchOptions>
double error_to_torch(Optimizer& optimizer, TorchOptions options) {
  at::Generator random = generator(22);
  const Tensor value = normal({9, 7}, at::kDouble, random);
  Tensor parameter = value.clone().requires_grad_();
  Torch torch({parameter}, options);
  for (const double rate : kLearningRates) {
    const Tensor grad = normal({9, 7}, at::kDouble, random);
    parameter.mutable_grad() = grad.clone();
    torch.param_groups()[0].options().set_lr(rate);
    torch.step();
    optimizer.step({{"w", value, grad}}, rate);
  }
  return worst_error(value, to_doubles(parameter.detach()));
}

TEST_CASE("steps are LibTorch's") {
  CHECK(error_to_torch<torch::optim::AdamW>(
            *make_adamw({0.8, 0.95, 0.1, 0.5}),
            torch::optim::AdamWOptions().betas({0.8, 0.95}).eps(0.1).weight_decay(0.5)) <= 1e-14);
  const bool nesterov = GENERATE(false, true);
  CHECK(error_to_torch<torch::optim::SGD>(
            *make_sgd({0.8, 0.1, nesterov}),
            torch::optim::SGDOptions(0.1).momentum(0.8).weight_decay(0.1).nesterov(nesterov)) <=
        1e-14);
}

std::unique_ptr<Optimizer> optimizer_by_name(const std::string& name) {
  if (name == "adamw") return make_adamw({.weight_decay = 0.1});
  return make_sgd({.momentum = 0.9, .weight_decay = 0.1, .nesterov = true});
}

// Tensors of odd sizes, so that vectors end elsewhere in a shard than in the whole; shards without
// rows, one that is replicated, and several dtypes in one call.
std::vector<TrainedTensor> odd_tensors(at::Generator& random) {
  std::vector<TrainedTensor> tensors;
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    for (const int64_t rows : {1, 3, 7, 37, 301}) {
      for (const int64_t columns : {1, 5, 13, 129}) {
        const std::string name = fmt::format("{} {} {}", c10::toString(dtype), rows, columns);
        tensors.push_back({name, normal({rows, columns}, dtype, random), {}});
      }
    }
  }
  tensors.push_back({"replicated", normal({11}, at::kFloat, random), {}, true});
  return tensors;
}

TrainedTensor part_of(const TrainedTensor& whole, int index, int shards) {
  TrainedTensor part = whole;
  part.value = whole.replicated ? whole.value.clone() : shard_of(whole.value, index, shards);
  return part;
}

void check_shards_are_rows(const std::vector<TrainedTensor>& whole,
                           const std::vector<std::vector<TrainedTensor>>& parts) {
  for (size_t i = 0; i < whole.size(); ++i) {
    std::vector<Tensor> rows;
    for (const auto& part : parts) rows.push_back(part[i].value);
    INFO(whole[i].name);
    for (const Tensor& copy : rows) {
      if (whole[i].replicated) CHECK(at::equal(copy, whole[i].value));
    }
    if (!whole[i].replicated) CHECK(at::equal(at::cat(rows), whole[i].value));
  }
}

TEST_CASE("a shard's step is the whole's, to the bit") {
  const std::string name = GENERATE("adamw", "sgd");
  const int shards = 3;
  at::Generator random = generator(23);
  std::vector<TrainedTensor> whole = odd_tensors(random);
  const auto optimizer = optimizer_by_name(name);
  std::vector<std::vector<TrainedTensor>> parts(shards);
  std::vector<std::unique_ptr<Optimizer>> optimizers;
  for (int index = 0; index < shards; ++index) {
    for (const TrainedTensor& tensor : whole)
      parts[index].push_back(part_of(tensor, index, shards));
    optimizers.push_back(optimizer_by_name(name));
  }
  for (int step = 0; step < 3; ++step) {
    for (size_t i = 0; i < whole.size(); ++i) {
      whole[i].grad = normal(whole[i].value.sizes(), whole[i].value.scalar_type(), random);
      for (int index = 0; index < shards; ++index) {
        TrainedTensor& part = parts[index][i];
        part.grad =
            whole[i].replicated ? whole[i].grad.clone() : shard_of(whole[i].grad, index, shards);
      }
    }
    optimizer->step(whole, kLearningRates[step]);
    for (int index = 0; index < shards; ++index) {
      optimizers[index]->step(parts[index], kLearningRates[step]);
    }
  }
  check_shards_are_rows(whole, parts);
  for (const auto& [role, tensors] : optimizer->state()) {
    for (const TrainedTensor& tensor : whole) {
      if (tensor.replicated) continue;
      std::vector<Tensor> rows;
      for (const auto& each : optimizers) rows.push_back(each->state().at(role).at(tensor.name));
      INFO(role << " of " << tensor.name);
      CHECK(at::equal(at::cat(rows), tensors.at(tensor.name)));
    }
  }
}

TEST_CASE("bf16 is computed in fp32 and rounded once") {
  const std::string name = GENERATE("adamw", "sgd");
  at::Generator random = generator(24);
  const Tensor value = normal({37, 13}, at::kBFloat16, random);
  const Tensor grad = normal({37, 13}, at::kBFloat16, random);
  const Tensor wide = value.to(at::kFloat);
  optimizer_by_name(name)->step({{"w", wide, grad.to(at::kFloat)}}, 1e-2);
  const auto optimizer = optimizer_by_name(name);
  optimizer->step({{"w", value, grad}}, 1e-2);
  CHECK(at::equal(value, wide.to(at::kBFloat16)));
  for (const auto& [role, tensors] : optimizer->state()) {
    CHECK(tensors.at("w").scalar_type() == at::kBFloat16);
  }
}

TEST_CASE("a restored optimizer continues as if it had not stopped") {
  const std::string name = GENERATE("adamw", "sgd");
  at::Generator random = generator(25);
  const auto straight = optimizer_by_name(name), stopped = optimizer_by_name(name),
             restored = optimizer_by_name(name);
  CHECK(straight->state().empty());
  restored->restore(stopped->state(), 0);  // a checkpoint before the first step
  const Tensor value = normal({5}, at::kFloat, random);
  const Tensor continued = value.clone();
  for (int step = 0; step < 4; ++step) {
    const Tensor grad = normal({5}, at::kFloat, random);
    straight->step({{"w", value, grad}}, 1e-2);
    (step < 2 ? stopped : restored)->step({{"w", continued, grad}}, 1e-2);
    if (step == 1) restored->restore(stopped->state(), stopped->steps());
  }
  CHECK(at::equal(continued, value));
  CHECK(restored->steps() == 4);
}

TEST_CASE("a rank that trains nothing keeps a state to restore") {
  const auto optimizer = make_adamw({});
  optimizer->step({}, 1e-2);
  CHECK(optimizer->steps() == 1);
  make_adamw({})->restore(optimizer->state(), 1);
}

TEST_CASE("restoring refuses another optimizer's state") {
  const auto refusal = [](Optimizer::State state) {
    return error_text([&] { make_adamw({})->restore(std::move(state), 3); });
  };
  const std::string other = refusal({{"exp_avg", {}}, {"momentum_buffer", {}}});
  CHECK(contains(other, "momentum_buffer, which"));
  CHECK(contains(other, "no exp_avg_sq"));
  CHECK(contains(refusal({}), "no exp_avg;"));
  CHECK(contains(error_text([] { make_sgd({})->restore({}, -1); }), "-1 steps"));
}

TEST_CASE("a step refuses what does not fit, and changes nothing") {
  const auto optimizer = make_adamw({});
  const Tensor value = at::ones({2, 3}), good = at::ones({2, 3});
  optimizer->step({{"w", value, good}}, 0);
  const auto refusal = [&](const TrainedTensor& tensor, double rate = 1e-2) {
    return error_text(
        [&] {
          optimizer->step({{"w", value, good}, tensor}, rate);
        },
        ErrorKind::kInternal);
  };
  const Tensor other = at::ones({2, 3});
  CHECK(contains(refusal({"b", other, {}}), "gradient of b"));
  CHECK(contains(refusal({"b", {}, other}), "b has no value"));
  CHECK(contains(refusal({"b", other, at::ones({3, 2})}), "it is [3, 2] Float on cpu"));
  CHECK(contains(refusal({"b", other, other.to(at::kDouble)}), "it is [2, 3] Double on cpu"));
  CHECK(contains(refusal({"b", other, other.to(at::kMeta)}), "it is [2, 3] Float on meta"));
  CHECK(contains(refusal({"b", other, other}), "b has no exp_avg after 1 steps"));
  CHECK(contains(refusal({"w", at::ones({4}), at::ones({4})}), "exp_avg of w"));
  CHECK(contains(refusal({"w", value, good}, -1), "learning rate -1"));
  CHECK(at::equal(value, at::ones({2, 3})));
  CHECK(optimizer->steps() == 1);
}

TEST_CASE("a step records nothing for a backward pass") {
  const Tensor value = at::ones({3}).requires_grad_();
  make_adamw({})->step({{"w", value, at::ones({3})}}, 1e-2);
  make_sgd({.momentum = 0.9})->step({{"w", value, at::ones({3})}}, 1e-2);
  CHECK(value.is_leaf());
  CHECK(value.requires_grad());
}

TEST_CASE("options outside their ranges are refused, all at once") {
  const std::string adamw = error_text([] { make_adamw({1, kNan, -1, -2}); });
  for (const char* option : {"beta1 must be in [0, 1), is 1", "beta2", "epsilon", "weight_decay"}) {
    CHECK(contains(adamw, option));
  }
  const std::string sgd = error_text([] { make_sgd({-1, -1, true}); });
  for (const char* option : {"momentum must not be negative", "weight_decay", "nesterov"}) {
    CHECK(contains(sgd, option));
  }
  CHECK(std::string(make_adamw({})->name()) == "adamw");
  CHECK(std::string(make_sgd({})->name()) == "sgd");
}

}  // namespace
}  // namespace shardproof::fsdp
