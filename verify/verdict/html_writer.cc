#include "verify/verdict/html_writer.h"

#include <fmt/format.h>

#include "verify/verdict/evidence.h"
#include "verify/verdict/histogram.h"
#include "verify/verdict/html_parts.h"
#include "verify/verdict/summary.h"
#include "verify/verdict/text.h"

namespace shardproof::verify {
namespace {

std::string status_cell(Status status) {
  return fmt::format("<td class=\"{0}\">{0}</td>", to_string(status));
}

std::string head_row(const std::vector<std::string>& names, const std::vector<std::string>& numbers,
                     const std::string& last) {
  std::string out = "<tr>";
  for (const std::string& name : names) out += "<th>" + name + "</th>";
  for (const std::string& name : numbers) out += "<th class=\"number\">" + name + "</th>";
  return out + "<th>" + last + "</th></tr>\n";
}

std::string worst_place(const Worst& worst) {
  return worst.tensor ? worst.tensor->name + " in " + worst.in_case->id : "";
}

std::string summary_table(const Summary& summary) {
  std::string out = "<h2>Summary</h2>\n<div class=\"scroll\"><table>\n";
  out += head_row({"suite", "mode", "dtype"},
                  {"cases", "pass", "fail", "skip", "error", "worst error/limit"}, "where");
  for (const SummaryRow& row : summary.rows) {
    out += "<tr>" + html_cell(row.suite) + html_cell(row.mode) + html_cell(row.dtype);
    for (const int count : {row.cases, row.pass, row.fail, row.skip, row.error}) {
      out += html_number(with_thousands(count));
    }
    out += html_number(row.worst.tensor ? quotient_text(row.worst.quotient) : "-");
    out += html_cell(worst_place(row.worst)) + "</tr>\n";
  }
  return out + "</table></div>\n";
}

std::string run_facts(const Verdict& verdict) {
  std::string out = "<h2>Run</h2>\n<dl>\n" + html_definition("command", verdict.command) +
                    html_definition("commit", verdict.commit) +
                    html_definition("seed", fmt::format("{}", verdict.seed)) +
                    html_definition("started", verdict.started);
  for (const auto& [key, value] : verdict.machine) out += html_definition(key, value);
  return out + "</dl>\n";
}

std::string tensor_table(const CaseResult& result) {
  if (result.tensors.empty()) return "";
  std::string out = "<div class=\"scroll\"><table>\n";
  out += head_row({"tensor", "shape", "status"},
                  {"error", "reference error", "limit", "error/limit", "ratio"}, "where");
  for (const TensorResult& tensor : result.tensors) {
    out += "<tr>" + html_cell(tensor.name) + html_cell(shape_text(tensor)) +
           status_cell(tensor.status);
    for (const double error : {tensor.error, tensor.reference_error, tensor.limit}) {
      out += html_number(fmt::format("{:.3e}", error));
    }
    out += html_number(quotient_text(limit_quotient(tensor)));
    out += html_number(fmt::format("{:.6g}", tensor.ratio)) + html_cell(location_text(tensor));
    out += "</tr>\n";
  }
  return out + "</table></div>\n";
}

std::string evidence_list(const CaseResult& result) {
  std::string out = "<dl>\n";
  for (const Evidence& line : evidence(result)) {
    out += html_definition(std::string(line.label), line.text);
  }
  if (!result.replay.empty()) {
    out += "<dt>replay</dt><dd><code>" + escape_text(result.replay) + "</code></dd>\n";
  }
  return out + "</dl>\n";
}

std::string peer_lines(const CaseResult& result) {
  std::string out;
  for (const PeerVerdict& peer : result.peers) {
    out += html_definition(peer.test + (peer.accepts ? " (accepts)" : " (refuses)"), peer.evidence);
  }
  if (out.empty()) return out;
  return fmt::format("<h3>Published tests, on the same numbers</h3>\n<dl>\n{}</dl>\n", out);
}

std::string check_lines(const CaseResult& result) {
  std::string out;
  for (const CheckResult& check : result.checks) {
    if (check.status != Status::kPass && check.status != Status::kSkip)
      continue;  // in the evidence
    out += html_definition(check.name + " (" + to_string(check.status) + ")", check.detail);
  }
  return out.empty() ? out : "<dl>\n" + out + "</dl>\n";
}

std::string case_details(const CaseResult& result) {
  const bool bad = result.status == Status::kFail || result.status == Status::kError;
  return fmt::format(
      "<details{0}><summary><strong class=\"{1}\">{1}</strong> <code>{2}</code> {3}</summary>\n"
      "{4}{5}{6}{7}</details>\n",
      bad ? " open" : "", to_string(result.status), escape_text(result.id),
      seconds_text(result.seconds), evidence_list(result), tensor_table(result),
      check_lines(result), peer_lines(result));
}

// The bad cases first: they are why the page is opened.
std::string cases(const Verdict& verdict) {
  std::string bad, good;
  for (const CaseResult& result : verdict.cases) {
    const bool is_bad = result.status == Status::kFail || result.status == Status::kError;
    (is_bad ? bad : good) += case_details(result);
  }
  std::string out;
  if (!bad.empty()) out += "<h2>Failing cases</h2>\n" + bad;
  if (!good.empty()) out += "<h2>Other cases</h2>\n" + good;
  return out;
}

}  // namespace

std::string to_html(const Verdict& verdict) {
  constexpr std::size_t kNoLimit = 10000;  // a browser wraps the line
  const Summary summary = summarize(verdict);
  const std::string outcome = escape_text(outcome_line(verdict, kNoLimit));
  return html_head("Shardproof verdict") +
         fmt::format("<h1 class=\"{}\">{}</h1>\n", to_string(verdict.status()), outcome) +
         summary_table(summary) +
         "<h2>Error over limit</h2>\n<p>Judged tensors by error / limit; beyond 1 fails.</p>\n" +
         histogram_svg(quotient_histogram(verdict)) + cases(verdict) + run_facts(verdict) +
         kHtmlEnd;
}

}  // namespace shardproof::verify
