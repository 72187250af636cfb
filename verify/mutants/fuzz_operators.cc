#include "verify/mutants/fuzz_operators.h"

#include <ATen/ATen.h>

#include <array>
#include <cmath>
#include <functional>
#include <numeric>

#include "base/error.h"
#include "verify/mutants/fuzz_edits.h"
#include "verify/mutants/planting.h"

namespace shardproof::verify {
namespace {

using sim::FaultKind;

// One recorded call of one rank.
struct Site {
  int rank = 0;
  const CollectiveCall* call = nullptr;
  int64_t occurrence = 0;  // of its tag on the rank
};

int64_t sum(const std::vector<int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

bool is_float(const CollectiveCall& call) {
  return call.dtype == "Double" || call.dtype == "Float" || call.dtype == "BFloat16";
}
bool brings_numbers(const Site& site) {
  return is_float(*site.call) && sum(site.call->receive) > 0;
}
bool any(const Site&) { return true; }

// Members are exchanged where it matters who sent what. A sum of the same terms in another order
// is the same sum up to rounding, which no check promises to see.
bool tells_members_apart(const Site& site) {
  const CallKind kind = site.call->kind;
  return (kind == CallKind::kAllToAll || kind == CallKind::kAllGather) &&
         site.call->receive.size() > 1 && sum(site.call->receive) > 0;
}
// q, k and v travel under one tag, all issued before the first arrives; the fourth call follows one
// that has.
bool is_repeated(const Site& site) { return brings_numbers(site) && site.occurrence >= 3; }
bool is_receive(const Site& site) { return site.call->kind == CallKind::kRecv; }
bool reduces(const Site& site) {
  const CallKind kind = site.call->kind;
  const bool alike = kind == CallKind::kAllToAll && sum(site.call->send) == sum(site.call->receive);
  return brings_numbers(site) && (kind == CallKind::kAllReduce || alike);
}
// What is reduced in place is no buffer of the caller's any more.
bool has_own_input(const Site& site) {
  const CallKind kind = site.call->kind;
  return kind != CallKind::kAllReduce && kind != CallKind::kBroadcast && sum(site.call->send) > 0;
}

struct FaultOperator {
  FaultKind kind;
  bool (*fits)(const Site&);
};
constexpr std::array kFaults = {FaultOperator{FaultKind::kScale, brings_numbers},
                                FaultOperator{FaultKind::kRotatePeers, tells_members_apart},
                                FaultOperator{FaultKind::kRound, brings_numbers},
                                FaultOperator{FaultKind::kDrop, brings_numbers},
                                FaultOperator{FaultKind::kOmit, any},
                                FaultOperator{FaultKind::kStale, is_repeated},
                                FaultOperator{FaultKind::kEcho, is_receive},
                                FaultOperator{FaultKind::kSkipWait, brings_numbers},
                                FaultOperator{FaultKind::kReuse, has_own_input},
                                FaultOperator{FaultKind::kLocal, reduces},
                                FaultOperator{FaultKind::kHoldBack, any}};

std::optional<Site> draw_site(const FuzzTarget& target, Draw& draw, bool (*fits)(const Site&)) {
  std::vector<Site> sites;
  for (size_t r = 0; r < target.calls.size(); ++r) {
    std::map<std::string, int64_t> seen;
    for (const CollectiveCall& call : target.calls[r]) {
      const Site site{static_cast<int>(r), &call, seen[call.tag]++};
      if (fits(site)) sites.push_back(site);
    }
  }
  if (sites.empty()) return {};
  return sites[static_cast<size_t>(draw.between(0, static_cast<int64_t>(sites.size()) - 1))];
}

// The fault as `--fault` reads it.
std::string text_of(const sim::Fault& fault) {
  std::string text = fmt::format("{},tag={}", sim::fault_name(fault.kind), fault.tag);
  if (fault.rank >= 0) text += fmt::format(",rank={}", fault.rank);
  if (fault.occurrence >= 0) text += fmt::format(",call={}", fault.occurrence);
  if (fault.kind == FaultKind::kScale) text += fmt::format(",factor={:.17g}", fault.factor);
  if (fault.kind == FaultKind::kRotatePeers) text += fmt::format(",shift={}", fault.shift);
  if (fault.kind == FaultKind::kRound) {
    text += fault.dtype == at::kFloat ? ",dtype=fp32" : ",dtype=bf16";
  }
  return text;
}

Operation planted(const FuzzTarget& target, sim::Fault fault) {
  Operation operation;
  operation.name = sim::fault_name(fault.kind);
  operation.text = text_of(fault);
  operation.tag = fault.tag;
  operation.subject = target.clean;
  std::visit([&](auto& subject) { subject.faults.push_back(fault); }, operation.subject);
  return operation;
}

// 16 bits hold no narrower type whose rounding is above what their checks must see.
std::optional<c10::ScalarType> narrower(const CollectiveCall& call, const FuzzTarget& target,
                                        Draw& draw) {
  if (target.dtype == at::kBFloat16 || call.dtype == "BFloat16") return {};
  return call.dtype == "Double" && draw.chance(2) ? at::kFloat : at::kBFloat16;
}

// Where another order of the members gives the same sums in another order: of keys without a mask
// in the forward, and of the queries that see one key only, which gets the sum of their cotangents.
bool is_free_order(const FuzzTarget& target, const CollectiveCall& call) {
  if (!std::holds_alternative<AttentionSubject>(target.clean)) return false;
  const MaskKind mask = AttentionCase::parse(target.case_id).mask;
  return (call.tag == "kv.gather" && mask == MaskKind::kNone) ||
         (call.tag == "out.head_to_seq'" && mask == MaskKind::kOneKey);
}

std::optional<Operation> draw_fault(const FuzzTarget& target, Draw& draw, const FaultOperator& what,
                                    double factor) {
  const std::optional<Site> site = draw_site(target, draw, what.fits);
  if (!site) return {};
  sim::Fault fault{.kind = what.kind, .tag = site->call->tag, .rank = site->rank};
  switch (what.kind) {
    case FaultKind::kScale:
      fault.rank = -1;  // all that the collective delivers
      fault.factor = factor;
      break;
    case FaultKind::kRotatePeers:
      if (is_free_order(target, *site->call)) return {};
      fault.shift =
          static_cast<int>(draw.between(1, static_cast<int64_t>(site->call->receive.size()) - 1));
      break;
    case FaultKind::kRound: {
      const auto dtype = narrower(*site->call, target, draw);
      if (!dtype) return {};
      fault.rank = -1;
      fault.dtype = *dtype;
      break;
    }
    case FaultKind::kStale:
      fault.occurrence = site->occurrence;  // the first call has none before it
      break;
    default:
      fault.occurrence = draw.chance(2) ? site->occurrence : -1;
  }
  return planted(target, fault);
}

// |factor - 1| is spread evenly over its orders of magnitude.
double draw_factor(const FuzzTarget& target, Draw& draw) {
  constexpr int64_t kSteps = 1 << 30;
  const double low = std::log(least_change(target)), high = std::log(0.5);
  const double at = static_cast<double>(draw.between(0, kSteps)) / kSteps;
  const double change = std::exp(low + at * (high - low));
  return draw.chance(2) ? 1 + change : 1 - change;
}

// Until one has a target: each case has calls that bring numbers, which can be scaled.
Operation draw_until(const std::function<std::optional<Operation>()>& attempt) {
  constexpr int kTries = 1000;
  for (int i = 0; i < kTries; ++i) {
    if (auto operation = attempt()) return *operation;
  }
  internal_error("no operator has a target in {} attempts", kTries);
}

}  // namespace

double least_change(const FuzzTarget& target) {
  switch (target.dtype) {
    case at::kDouble:
      return 2e-10;
    case at::kFloat:
      return 2e-4;
    default:
      return std::holds_alternative<AttentionSubject>(target.clean) ? 1e-2 : 1e-1;
  }
}

Operation draw_operation(const FuzzTarget& target, Draw& draw) {
  return draw_until([&]() -> std::optional<Operation> {
    const double factor = draw_factor(target, draw);
    // Edits of the case's own parts are as likely as faults.
    if (draw.chance(2)) return draw_edit(target, draw, factor);
    return draw_fault(target, draw, draw.one_of(kFaults), factor);
  });
}

Operation draw_scaling(const FuzzTarget& target, Draw& draw, double factor) {
  return draw_until([&]() -> std::optional<Operation> {
    if (draw.chance(2)) return draw_scaling_edit(target, draw, factor, factor);
    return draw_fault(target, draw, kFaults[0], factor);
  });
}

}  // namespace shardproof::verify
