#include "verify/transport_check.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "base/error.h"
#include "verify/dtype.h"

namespace shardproof::verify {
namespace {

// Rounding that another order of a sum, in fp32 or better, may cause.
double rounding(at::ScalarType type) {
  if (!at::isFloatingType(type)) return 0;
  const bool low = type == at::kBFloat16 || type == at::kHalf;
  return (low ? 8 : 1024) * unit_roundoff(type);
}

double relative_difference(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.to(at::kDouble), y = b.to(at::kDouble);
  // Rows without a key are -inf on both sides.
  const at::Tensor same = x.eq(y).logical_or(x.isnan().logical_and(y.isnan()));
  const at::Tensor difference = (x - y).masked_fill(same, 0);
  const double norm =
      x.masked_fill(same.logical_and(x.isfinite().logical_not()), 0).norm().item<double>();
  const double distance = difference.norm().item<double>();
  return distance == 0 ? 0 : distance / norm;
}

}  // namespace

std::string trace_difference(const std::vector<CollectiveCall>& real,
                             const std::vector<CollectiveCall>& simulated) {
  const size_t common = std::min(real.size(), simulated.size());
  for (size_t i = 0; i < common; ++i) {
    if (real[i] == simulated[i]) continue;
    return fmt::format("collective {} is {} here and {} in the simulator", i,
                       real[i].to_json_line(), simulated[i].to_json_line());
  }
  if (real.size() == simulated.size()) return {};
  return fmt::format("{} collectives here, {} in the simulator", real.size(), simulated.size());
}

std::string result_difference(const RankResult& real, const RankResult& simulated, bool exact) {
  for (const auto& [name, x] : real) {
    const auto other = simulated.find(name);
    if (other == simulated.end()) return name + " is not there in the simulator";
    const at::Tensor& y = other->second;
    if (x.sizes() != y.sizes() || x.scalar_type() != y.scalar_type()) {
      return fmt::format("{} has another shape or dtype in the simulator", name);
    }
    const double difference = relative_difference(x, y);
    const double limit = exact ? 0 : rounding(x.scalar_type());
    if (!(difference <= limit)) {
      return fmt::format("{} differs from the simulator's by {:.1e} (allowed {:.1e})", name,
                         difference, limit);
    }
  }
  return real.size() == simulated.size() ? "" : "the simulator has more tensors";
}

void ComparedWorld::run(const RankProgram& program, std::vector<RankResult>& results) {
  findings_.clear();
  real_.run(program, results);
  if (!judges()) return;
  std::vector<RankResult> simulated;
  simulated_.run(program, simulated);
  const bool exact = size() == 2;
  CheckResult trace{"trace", Status::kPass, {}}, bits{"bitwise", Status::kPass, {}};
  const auto note = [](CheckResult& check, int rank, const std::string& difference) {
    if (difference.empty() || check.status == Status::kFail) return;
    check = {check.name, Status::kFail, fmt::format("rank {}: {}", rank, difference)};
  };
  for (int r = 0; r < size(); ++r) {
    const auto at = static_cast<size_t>(r);
    note(trace, r, trace_difference(real_.calls(r), simulated_.calls(r)));
    note(bits, r, result_difference(results[at], simulated[at], exact));
  }
  findings_ = real_.findings();
  findings_.insert(findings_.end(), {trace, bits});
}

RankWorld& ComparedWorlds::get(int ranks) {
  auto& world = worlds_[ranks];
  if (!world) {
    world = std::make_unique<ComparedWorld>(real_.get(ranks), simulated_.get(ranks));
  }
  return *world;
}

}  // namespace shardproof::verify
