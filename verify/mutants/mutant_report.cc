#include "verify/mutants/mutant_report.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "verify/peers/peer_tests.h"
#include "verify/verdict/evidence.h"
#include "verify/verdict/html_parts.h"
#include "verify/verdict/text.h"

namespace shardproof::verify {
namespace {

using Json = nlohmann::ordered_json;

std::string joined(const std::set<std::string>& words) {
  return join({words.begin(), words.end()}, " ");
}

std::string first_cause(const MutantOutcome& outcome) {
  const CaseResult* kill = outcome.kill();
  return kill && !kill->hypotheses.empty() ? kill->hypotheses[0].kind : "";
}

std::string finding(const MutantOutcome& outcome) {
  const CaseResult* kill = outcome.kill();
  return kill ? first_finding(*kill) : "";
}

// Of the published tests that were asked: "5 of 8 accept".
std::string peers_text(const MutantOutcome& outcome) {
  int asked = 0, accept = 0;
  for (const std::string& name : peer_names()) {
    const MutantOutcome::Peer peer = outcome.peer(name);
    asked += peer != MutantOutcome::Peer::kNotAsked;
    accept += peer == MutantOutcome::Peer::kAccepts;
  }
  return asked == 0 ? "-" : fmt::format("{} of {}", accept, asked);
}

// A remark where the outcome is not what the catalogue says.
std::string remark(const MutantOutcome& outcome) {
  if (!outcome.expressible()) return "";
  std::vector<std::string> words;
  if (outcome.killed() && !outcome.named()) words.push_back("another tensor first");
  if (outcome.killed() && !outcome.cause_named_first()) {
    words.push_back("expected " + outcome.mutant.cause);
  }
  if (outcome.mutant.forward_right && !outcome.forward_held()) words.push_back("forward wrong");
  if (!outcome.false_alarms().empty()) words.push_back("fires without its trigger");
  return join(words, ", ");
}

int correct_cases(const MutantRun& run) {
  size_t count = run.clean.size();
  for (const MutantOutcome& outcome : run.outcomes) count += outcome.innocent.size();
  return static_cast<int>(count);
}

const CaseResult* erring_case(const MutantOutcome& outcome) {
  for (const CaseResult& result : outcome.planted) {
    if (result.status == Status::kError || result.status == Status::kSkip) return &result;
  }
  return nullptr;
}

std::string state_of(const MutantOutcome& outcome) {
  if (!outcome.expressible()) return "-";
  return outcome.killed() ? "killed" : "SURVIVED";
}

Json location_json(const CaseResult& kill) {
  Json json = Json::object();
  json["case"] = kill.id;
  json["first_wrong"] = first_finding(kill);
  json["rank"] = nullptr;
  json["head"] = nullptr;
  json["tokens"] = nullptr;
  for (const TensorResult& tensor : kill.tensors) {
    if (tensor.name != kill.first_wrong || !tensor.where) continue;
    if (tensor.where->rank >= 0) json["rank"] = tensor.where->rank;
    if (tensor.where->head >= 0) json["head"] = tensor.where->head;
    if (tensor.where->token_begin >= 0) {
      json["tokens"] = {tensor.where->token_begin, tensor.where->token_end};
    }
  }
  return json;
}

Json mutant_json(const MutantOutcome& outcome) {
  const Mutant& mutant = outcome.mutant;
  Json json = Json::object();
  json["id"] = mutant.id;
  json["class"] = mutant.kind;
  json["source"] = mutant.source;
  json["link"] = mutant.link;
  json["text"] = mutant.text;
  json["expressible"] = outcome.expressible();
  json["reason"] = mutant.inexpressible;
  json["killed"] = outcome.killed();
  json["by"] = outcome.killed_by();
  const CaseResult* kill = outcome.kill();
  json["location"] = kill ? location_json(*kill) : Json(nullptr);
  json["hypothesis"] = nullptr;
  if (kill && !kill->hypotheses.empty()) {
    const Hypothesis& first = kill->hypotheses[0];
    json["hypothesis"] = {
        {"class", first.kind}, {"text", first.text}, {"evidence", first.evidence}};
  }
  json["expected"] = {{"class", mutant.cause},
                      {"first_wrong", mutant.first_wrong},
                      {"forward_right", mutant.forward_right}};
  json["as_expected"] = {{"class", outcome.cause_named_first()},
                         {"first_wrong", outcome.named()},
                         {"forward_right", !mutant.forward_right || outcome.forward_held()}};
  json["peers"] = Json::object();
  for (const std::string& name : peer_names()) {
    const MutantOutcome::Peer peer = outcome.peer(name);
    if (peer == MutantOutcome::Peer::kNotAsked) continue;
    json["peers"][name] = peer == MutantOutcome::Peer::kAccepts ? "accepts" : "refuses";
  }
  json["seconds"] = outcome.seconds();
  return json;
}

// Wide cells for sentences, narrow ones for the matrix of published tests.
constexpr const char* kTableStyle = R"(
td.bug { min-width: 20rem; } td:last-child { min-width: 0; } table.peers td { text-align: center; }
table.peers th.test { writing-mode: vertical-rl; vertical-align: bottom; }
)";

std::string peer_cell(MutantOutcome::Peer peer) {
  switch (peer) {
    case MutantOutcome::Peer::kAccepts:
      return "<td class=\"fail\">accepts</td>";
    case MutantOutcome::Peer::kRefuses:
      return "<td class=\"pass\">refuses</td>";
    default:
      return "<td>-</td>";
  }
}

std::string id_cell(const Mutant& mutant) {
  if (mutant.link.empty()) return html_cell(mutant.id);
  return fmt::format("<td><a href=\"{}\">{}</a></td>", escape_attribute(mutant.link),
                     escape_text(mutant.id));
}

std::string mutant_row(const MutantOutcome& outcome) {
  const Mutant& mutant = outcome.mutant;
  std::string out = "<tr>" + id_cell(mutant);
  out +=
      fmt::format("<td class=\"bug\">{}</td>", escape_text(mutant.text)) + html_cell(mutant.kind);
  if (!outcome.expressible()) {
    return out + fmt::format("<td colspan=\"4\">not planted: {}</td></tr>\n",
                             escape_text(mutant.inexpressible));
  }
  out += fmt::format("<td class=\"{}\">{}</td>", outcome.killed() ? "pass" : "fail",
                     outcome.killed() ? escape_text(joined(outcome.killed_by())) : "survived");
  return out + html_cell(finding(outcome)) + html_cell(first_cause(outcome)) +
         html_cell(remark(outcome)) + "</tr>\n";
}

std::string peer_row(const MutantOutcome& outcome) {
  std::string out = "<tr>" + id_cell(outcome.mutant);
  for (const std::string& name : peer_names()) out += peer_cell(outcome.peer(name));
  return out + "</tr>\n";
}

std::string bug_table(const MutantRun& run) {
  std::string out = "<div class=\"scroll\"><table>\n<tr>";
  for (const char* head : {"id", "bug", "class", "killed by", "first wrong", "cause", "remark"}) {
    out += fmt::format("<th>{}</th>", head);
  }
  out += "</tr>\n";
  for (const MutantOutcome& outcome : run.outcomes) out += mutant_row(outcome);
  return out + "</table></div>\n";
}

std::string peer_table(const MutantRun& run) {
  std::string out = "<div class=\"scroll\"><table class=\"peers\">\n<tr><th>id</th>";
  for (const std::string& name : peer_names()) {
    out += "<th class=\"test\">" + escape_text(name) + "</th>";
  }
  out += "</tr>\n";
  for (const MutantOutcome& outcome : run.outcomes) {
    if (outcome.expressible()) out += peer_row(outcome);
  }
  return out + "</table></div>\n";
}

}  // namespace

std::string mutants_summary(const MutantRun& run) {
  return fmt::format(
      "{} of {} mutants killed, first wrong tensor as expected in {}, cause named first in {}, {} "
      "in "
      "{}, {}",
      run.killed(), run.expressible(), run.named(), run.cause_named_first(),
      count_of(static_cast<int64_t>(run.false_alarms().size()), "false alarm"),
      count_of(correct_cases(run), "correct case"), seconds_text(run.seconds));
}

std::string mutants_to_terminal(const MutantRun& run, bool color) {
  const auto paint = [&](const char* code, const std::string& text) {
    return painted(color, code, text);
  };
  std::string out = fmt::format("{:<4}  {:<8}  {:<32}  {:<42}  {:<17}  {:<8}  {}\n", "id", "",
                                "killed by", "first wrong", "cause", "accepted", "");
  for (const MutantOutcome& outcome : run.outcomes) {
    const std::string state = fmt::format("{:<8}", state_of(outcome));
    const bool survived = outcome.expressible() && !outcome.killed();
    std::string line = fmt::format(
        "{:<4}  {}  {:<32}  {:<42}  {:<17}  {:<8}  {}", outcome.mutant.id,
        survived ? paint("1;31", state) : state, elide_end(joined(outcome.killed_by()), 32),
        elide_middle(finding(outcome), 42), first_cause(outcome), peers_text(outcome),
        outcome.expressible() ? remark(outcome) : "not planted: " + outcome.mutant.inexpressible);
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
    if (const CaseResult* erring = erring_case(outcome); erring && !outcome.killed()) {
      out += "      " + elide_end(printable(erring->reason), 140) + "\n";
    }
  }
  out += "\naccepted: published tests that accept the mutant, of those that run such numbers\n";
  for (const std::string& alarm : run.false_alarms()) out += "false alarm: " + alarm + "\n";
  return out + "\n" + paint(run.holds() ? "1;32" : "1;31", mutants_summary(run)) + "\n";
}

std::string mutants_to_json(const MutantRun& run, const RunFacts& facts) {
  Json json = report_json("shardproof-mutants", facts, run.seconds);
  json["counts"] = {{"expressible", run.expressible()},
                    {"killed", run.killed()},
                    {"first_wrong_as_expected", run.named()},
                    {"cause_named_first", run.cause_named_first()},
                    {"correct_cases", correct_cases(run)}};
  json["false_alarms"] = run.false_alarms();
  json["mutants"] = Json::array();
  for (const MutantOutcome& outcome : run.outcomes) json["mutants"].push_back(mutant_json(outcome));
  return dump_report(json);
}

std::string mutants_to_html(const MutantRun& run, const RunFacts& facts) {
  std::string out = html_head("Shardproof kill matrix", kTableStyle) + "<h1>" +
                    escape_text(mutants_summary(run)) + "</h1>\n";
  out +=
      "<p>Each row is a bug that was found in public code (O: nobody's), planted here on purpose. "
      "Killed by: which of our checks see it. FWD output of attention, a block or a model; LOSS; "
      "GRAD gradients before clipping; NORM their norm; STEP what the optimizer makes of them; the "
      "others are checks of traffic, ownership, waiting and bits. First wrong: the first tensor in "
      "program order, or check, that the verdict names; cause: its first hypothesis.</p>\n";
  out += bug_table(run);
  out +=
      "<h2>Published tests on the same numbers</h2>\n<p>Their criteria (fixed tolerances, one norm "
      "of all gradients) on the tensors that we judge; a dash: the test does not run such code or "
      "dtype.</p>\n";
  out += peer_table(run);
  const std::vector<std::string> alarms = run.false_alarms();
  if (!alarms.empty()) out += "<h2>False alarms</h2>\n<ul>\n";
  for (const std::string& alarm : alarms) {
    out += "<li class=\"fail\">" + escape_text(alarm) + "</li>\n";
  }
  if (!alarms.empty()) out += "</ul>\n";
  return out + facts_html(facts) + kHtmlEnd;
}

}  // namespace shardproof::verify
