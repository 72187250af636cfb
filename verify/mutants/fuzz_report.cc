#include "verify/mutants/fuzz_report.h"

#include <fmt/format.h>

#include <array>
#include <map>
#include <nlohmann/json.hpp>

#include "verify/verdict/evidence.h"
#include "verify/verdict/text.h"

namespace shardproof::verify {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::array kFates = {FuzzFate::kKilled, FuzzFate::kEquivalent, FuzzFate::kError,
                               FuzzFate::kSurvived};

using Counts = std::map<FuzzFate, int64_t>;

std::map<std::string, Counts> by_operator(const FuzzRun& run) {
  std::map<std::string, Counts> table;
  for (const FuzzOutcome& outcome : run.outcomes) {
    ++table[outcome.mutant.operators][outcome.fate];
  }
  return table;
}

int64_t tried(const Counts& counts) {
  int64_t sum = 0;
  for (const auto& [fate, count] : counts) sum += count;
  return sum;
}

std::string row(const std::string& name, const Counts& counts) {
  const auto of = [&](FuzzFate fate) {
    const auto found = counts.find(fate);
    return found == counts.end() ? int64_t{0} : found->second;
  };
  std::string line = fmt::format("{:<16}{:>8}", name, with_thousands(tried(counts)));
  for (const FuzzFate fate : kFates) line += fmt::format("{:>12}", with_thousands(of(fate)));
  return line + "\n";
}

std::string replay(const FuzzRun& run, const FuzzOutcome& outcome) {
  return fmt::format("./shardproof mutants --fuzz 1 --seed {} --from {}", run.seed, outcome.index);
}

bool is_remarkable(const FuzzOutcome& outcome) {
  return outcome.fate == FuzzFate::kSurvived || outcome.fate == FuzzFate::kError;
}

std::string line_of(const FuzzRun& run, const FuzzOutcome& outcome) {
  return fmt::format("{}  {}  {}  {}  {}\n", to_string(outcome.fate), outcome.mutant.plant.case_id,
                     outcome.mutant.text, elide_end(printable(outcome.detail), 140),
                     replay(run, outcome));
}

}  // namespace

std::string fuzz_summary(const FuzzRun& run) {
  return fmt::format("{} of seed {}: {} killed, {} equivalent, {}, {} survived, {}",
                     count_of(std::ssize(run.outcomes), "random mutant"), run.seed,
                     with_thousands(run.count(FuzzFate::kKilled)),
                     with_thousands(run.count(FuzzFate::kEquivalent)),
                     count_of(run.count(FuzzFate::kError), "error"),
                     with_thousands(run.count(FuzzFate::kSurvived)), seconds_text(run.seconds));
}

std::string fuzz_to_terminal(const FuzzRun& run, bool color) {
  std::string out = fmt::format("{:<16}{:>8}{:>12}{:>12}{:>12}{:>12}\n", "operator", "tried",
                                "killed", "equivalent", "errors", "survived");
  for (const auto& [name, counts] : by_operator(run)) out += row(name, counts);
  out += "\n";
  for (const FuzzOutcome& outcome : run.outcomes) {
    if (is_remarkable(outcome)) out += line_of(run, outcome);
  }
  return out + painted(color, run.holds() ? "1;32" : "1;31", fuzz_summary(run)) + "\n";
}

std::string fuzz_to_json(const FuzzRun& run, const RunFacts& facts) {
  Json json = report_json("shardproof-fuzz", facts, run.seconds);
  json["counts"] = Json::object();
  for (const FuzzFate fate : kFates) json["counts"][to_string(fate)] = run.count(fate);
  json["operators"] = Json::object();
  for (const auto& [name, counts] : by_operator(run)) {
    Json& entry = json["operators"][name] = Json::object();
    entry["tried"] = tried(counts);
    for (const auto& [fate, count] : counts) entry[to_string(fate)] = count;
  }
  json["mutants"] = Json::array();
  for (const FuzzOutcome& outcome : run.outcomes) {
    json["mutants"].push_back({{"index", outcome.index},
                               {"operator", outcome.mutant.operators},
                               {"text", outcome.mutant.text},
                               {"case", outcome.mutant.plant.case_id},
                               {"fate", to_string(outcome.fate)},
                               {"detail", outcome.detail},
                               {"replay", replay(run, outcome)}});
  }
  return dump_report(json);
}

}  // namespace shardproof::verify
