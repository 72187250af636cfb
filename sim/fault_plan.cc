#include "sim/fault_plan.h"

#include <fnmatch.h>

#include <charconv>
#include <utility>

#include "base/error.h"

namespace shardproof::sim {
namespace {

constexpr std::pair<FaultKind, const char*> kNames[] = {{FaultKind::kScale, "scale"},
                                                        {FaultKind::kDrop, "drop"},
                                                        {FaultKind::kRotatePeers, "rotate-peers"},
                                                        {FaultKind::kRound, "round"},
                                                        {FaultKind::kStale, "stale"},
                                                        {FaultKind::kEcho, "echo"},
                                                        {FaultKind::kLocal, "local"},
                                                        {FaultKind::kOmit, "omit"},
                                                        {FaultKind::kReuse, "reuse"},
                                                        {FaultKind::kSkipWait, "skip-wait"},
                                                        {FaultKind::kHoldBack, "hold-back"},
                                                        {FaultKind::kDelay, "delay"},
                                                        {FaultKind::kKill, "kill"},
                                                        {FaultKind::kHang, "hang"}};

constexpr std::pair<const char*, c10::ScalarType> kDtypes[] = {{"fp32", c10::ScalarType::Float},
                                                               {"bf16", c10::ScalarType::BFloat16},
                                                               {"fp16", c10::ScalarType::Half}};

template <class Number>
Number parse_number(const std::string& text, const std::string& word) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    bad_input("fault '{}': expected a number after '='", word);
  }
  return value;
}

FaultKind parse_kind(const std::string& name) {
  std::string known;
  for (const auto& [kind, text] : kNames) {
    if (name == text) return kind;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", text);
  }
  bad_input("unknown fault '{}'; known: {}", name, known);
}

c10::ScalarType parse_rounding(const std::string& name, const std::string& word) {
  for (const auto& [text, dtype] : kDtypes) {
    if (name == text) return dtype;
  }
  bad_input("fault '{}': expected fp32, bf16 or fp16", word);
}

void set_field(Fault& fault, const std::string& word) {
  const size_t equals = word.find('=');
  const std::string key = word.substr(0, equals);
  const std::string value = equals == std::string::npos ? "" : word.substr(equals + 1);
  if (key == "rank") {
    fault.rank = parse_number<int>(value, word);
  } else if (key == "call") {
    fault.occurrence = parse_number<int64_t>(value, word);
  } else if (key == "tag") {
    fault.tag = value;
  } else if (key == "factor") {
    fault.factor = parse_number<double>(value, word);
  } else if (key == "shift") {
    fault.shift = parse_number<int>(value, word);
  } else if (key == "dtype") {
    fault.dtype = parse_rounding(value, word);
  } else {
    bad_input("fault '{}': expected rank=, call=, tag=, factor=, shift= or dtype=", word);
  }
}

}  // namespace

const char* fault_name(FaultKind kind) {
  for (const auto& [known, name] : kNames) {
    if (known == kind) return name;
  }
  return "?";
}

Fault parse_fault(const std::string& text) {
  Fault fault;
  size_t at = text.find(',');
  fault.kind = parse_kind(text.substr(0, at));
  while (at != std::string::npos) {
    const size_t next = text.find(',', at + 1);
    set_field(fault, text.substr(at + 1, next == std::string::npos ? next : next - at - 1));
    at = next;
  }
  return fault;
}

FaultMatcher::FaultMatcher(const FaultPlan& plan, int rank) {
  for (const Fault& fault : plan) {
    if (fault.rank == -1 || fault.rank == rank) faults_.push_back(fault);
  }
  seen_.assign(faults_.size(), 0);
}

const Fault* FaultMatcher::match(const std::string& tag) {
  const Fault* found = nullptr;
  for (size_t i = 0; i < faults_.size(); ++i) {
    if (fnmatch(faults_[i].tag.c_str(), tag.c_str(), 0) != 0) continue;
    const int64_t n = seen_[i]++;
    if (!found && (faults_[i].occurrence == -1 || faults_[i].occurrence == n)) found = &faults_[i];
  }
  return found;
}

}  // namespace shardproof::sim
