#include "verify/mutants/sensitivity_report.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "verify/dtype.h"
#include "verify/mutants/binomial.h"
#include "verify/verdict/evidence.h"
#include "verify/verdict/text.h"

namespace shardproof::verify {
namespace {

using Json = nlohmann::ordered_json;

// Missing sizes are above all others.
bool sees_less(const std::optional<double>& a, const std::optional<double>& b) {
  return b && (!a || *a > *b);
}

Json curve_json(const PowerCurve& curve) {
  const std::optional<double> smallest = curve.smallest();
  Json json = Json::object();
  json["cases"] = curve.cases;
  json["refused_without_error"] = curve.excluded;
  json["smallest"] = smallest ? Json(*smallest) : Json(nullptr);
  json["caught"] = curve.caught;
  // How sure the share is: it is above this one with 95% confidence.
  json["at_least"] = Json::array();
  for (const int caught : curve.caught) {
    json["at_least"].push_back(curve.cases > 0 ? binomial_lower(caught, curve.cases) : 0.0);
  }
  return json;
}

Json scope_json(const ScopePower& scope) {
  Json json = Json::object();
  json["dtype"] = dtype_name(scope.dtype);
  json["scope"] = scope_name(scope.scope);
  json["text"] = scope_text(scope.scope);
  json["bitwise_cases"] = scope.bitwise;
  json["shardproof"] = curve_json(scope.ours);
  json["peers"] = Json::object();
  for (const auto& [test, curve] : scope.peers) json["peers"][test] = curve_json(curve);
  return json;
}

std::string peer_text(const std::string& name, const std::optional<double>& size) {
  return name.empty() ? "-" : fmt::format("{:<8}  {}", size_text(size), name);
}

}  // namespace

PeerRange peer_range(const ScopePower& scope) {
  PeerRange range;
  for (const auto& [test, curve] : scope.peers) {
    if (curve.cases == 0) continue;  // it refuses every correct case
    const std::optional<double> size = curve.smallest();
    if (range.sharpest.empty() || sees_less(range.smallest, size)) {
      range.sharpest = test;
      range.smallest = size;
    }
    if (range.bluntest.empty() || sees_less(size, range.largest)) {
      range.bluntest = test;
      range.largest = size;
    }
  }
  return range;
}

std::string size_text(const std::optional<double>& size) {
  return size ? fmt::format("{:.1e}", *size) : "> 1";
}

std::string alarm_text(const AlarmCount& count) {
  return fmt::format("{} in {} of {}: with 95% confidence fewer than 1 in {}",
                     count_of(static_cast<int64_t>(count.alarms.size()), "alarm"),
                     count_of(count.cases, "correct case"), count.kind,
                     with_thousands(static_cast<int64_t>(1 / count.upper())));
}

std::string power_summary(const PowerRun& run) {
  size_t alarms = 0;
  int64_t cases = 0;
  for (const AlarmCount& count : run.alarms) alarms += count.alarms.size(), cases += count.cases;
  return fmt::format("{} in {}, {}", count_of(static_cast<int64_t>(alarms), "false alarm"),
                     count_of(cases, "correct case"), seconds_text(run.seconds));
}

std::string power_to_terminal(const PowerRun& run, bool color) {
  const auto paint = [&](const char* code, const std::string& text) {
    return painted(color, code, text);
  };
  std::string out =
      "The smallest e from which on 99% of correct cases are refused after 1 + e multiplied "
      "...\n\n";
  out += fmt::format("{:<5}  {:<34}  {:>5}  {:<10}  {:<44}  {}\n", "dtype", "... this", "cases",
                     "Shardproof", "sharpest published test", "bluntest published test");
  for (const ScopePower& scope : run.scopes) {
    const PeerRange peers = peer_range(scope);
    std::string line = fmt::format(
        "{:<5}  {:<34}  {:>5}  {}  {:<44}  {}", dtype_name(scope.dtype), scope_text(scope.scope),
        scope.ours.cases, paint("1", fmt::format("{:<10}", size_text(scope.ours.smallest()))),
        elide_end(peer_text(peers.sharpest, peers.smallest), 44),
        peers.bluntest == peers.sharpest ? "" : peer_text(peers.bluntest, peers.largest));
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  }
  out += "\n> 1: an error of 1 (twice the value) is missed in more than 1% of the cases\n";
  for (const AlarmCount& count : run.alarms) {
    out += alarm_text(count) + "\n";
    for (const std::string& alarm : count.alarms) out += "  false alarm: " + alarm + "\n";
  }
  return out + "\n" + paint(run.holds() ? "1;32" : "1;31", power_summary(run)) + "\n";
}

std::string power_to_json(const PowerRun& run, const RunFacts& facts) {
  Json json = report_json("shardproof-power", facts, run.seconds);
  json["sizes"] = run.sizes;
  json["curves"] = Json::array();
  for (const ScopePower& scope : run.scopes) json["curves"].push_back(scope_json(scope));
  json["correct"] = Json::array();
  for (const AlarmCount& count : run.alarms) {
    json["correct"].push_back({{"kind", count.kind},
                               {"cases", count.cases},
                               {"alarms", count.alarms},
                               {"upper_bound", count.upper()}});
  }
  return dump_report(json);
}

}  // namespace shardproof::verify
