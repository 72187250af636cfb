#include "verify/verdict/terminal_writer.h"

#include <fmt/format.h>

#include <algorithm>

#include "verify/verdict/evidence.h"
#include "verify/verdict/summary.h"
#include "verify/verdict/text.h"

namespace shardproof::verify {
namespace {

constexpr std::size_t kWidth = 110;
constexpr std::size_t kLabelWidth = 13;  // of the evidence, after two spaces
constexpr std::size_t kPlaceWidth = 24;  // the least that the "where" column gets
constexpr std::size_t kNameWidth = 16;   // the most that suite, mode and dtype get

class Paint {
 public:
  explicit Paint(bool color) : color_(color) {}
  std::string bold(const std::string& text) const { return wrap("1", text); }
  std::string dim(const std::string& text) const { return wrap("2", text); }
  std::string by_status(Status status, const std::string& text) const {
    const bool good = status == Status::kPass;
    return wrap(good ? "1;32" : status == Status::kFail ? "1;31" : "1;33", text);
  }

 private:
  std::string wrap(const char* code, const std::string& text) const {
    return painted(color_, code, text);
  }
  bool color_;
};

using Row = std::vector<std::string>;

// The first three columns are names (left), the rest numbers (right), the last a place (left).
std::string align(const std::vector<Row>& rows, const Paint& paint) {
  std::vector<std::size_t> widths(rows.front().size(), 0);
  for (const Row& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], columns(row[i]));
  }
  std::size_t used = 0;
  for (std::size_t i = 0; i + 1 < widths.size(); ++i) used += widths[i] + 2;
  const std::size_t room = std::max(kPlaceWidth, used < kWidth ? kWidth - used : 0);
  std::string out;
  for (const Row& row : rows) {
    std::string line;
    for (std::size_t i = 0; i + 1 < row.size(); ++i) {
      const std::string padding(widths[i] - columns(row[i]), ' ');
      line += (i < 3 ? row[i] + padding : padding + row[i]) + "  ";
    }
    line += elide_middle(row.back(), room);
    line.erase(line.find_last_not_of(' ') + 1);
    out += (&row == &rows.front() ? paint.dim(line) : line) + "\n";
  }
  return out;
}

// "image.k:grad in joint/dp1.ring2.ulysses2/ragged": the row's own parts are not repeated.
std::string place(const Worst& worst) {
  if (!worst.tensor) return "-";
  const CaseName name = split_case_id(worst.in_case->id);
  std::vector<std::string> parts;
  for (const std::string& part : {name.subject, name.mesh, name.variant}) {
    if (!part.empty()) parts.push_back(part);
  }
  return printable(worst.tensor->name + " in " + join(parts, "/"));
}

std::string table(const Verdict& verdict, const Summary& summary, const Paint& paint) {
  if (summary.rows.empty()) return "";
  const Verdict::Counts n = verdict.counts();
  Row head = {"suite", "mode", "dtype", "cases", "pass", "fail"};
  if (n.skip > 0) head.push_back("skip");
  if (n.error > 0) head.push_back("error");
  head.insert(head.end(), {"worst/limit", "where"});
  std::vector<Row> rows = {head};
  for (const SummaryRow& row : summary.rows) {
    Row cells;
    for (const std::string& name : {row.suite, row.mode, row.dtype}) {
      cells.push_back(elide_end(name.empty() ? "-" : printable(name), kNameWidth));
    }
    cells.push_back(with_thousands(row.cases));
    cells.push_back(with_thousands(row.pass));
    cells.push_back(with_thousands(row.fail));
    if (n.skip > 0) cells.push_back(with_thousands(row.skip));
    if (n.error > 0) cells.push_back(with_thousands(row.error));
    cells.push_back(row.worst.tensor ? quotient_text(row.worst.quotient) : "-");
    cells.push_back(place(row.worst));
    rows.push_back(cells);
  }
  return align(rows, paint) + "\n";
}

std::string skips(const Summary& summary) {
  std::string out;
  for (const auto& [reason, count] : summary.skip_reasons) {
    const std::string text = fmt::format("skipped {}: {}", count_of(count, "case"),
                                         reason.empty() ? "no reason given" : printable(reason));
    for (const std::string& line : wrap_words(text, kWidth)) out += line + "\n";
  }
  return out.empty() ? out : out + "\n";
}

std::string labelled(std::string_view label, const std::vector<std::string>& lines,
                     const Paint& paint) {
  std::string out;
  for (const std::string& line : lines) {
    const std::string padded = fmt::format("  {:<{}}", label, kLabelWidth);
    out += (label.empty() ? padded : paint.dim(padded)) + line + "\n";
    label = "";
  }
  return out;
}

std::string failure(const CaseResult& result, const Paint& paint) {
  const std::size_t width = kWidth - kLabelWidth - 2;
  const char* word = result.status == Status::kFail ? "FAIL" : "ERROR";
  std::string out = fmt::format("{} {}\n", paint.by_status(result.status, word),
                                paint.bold(printable(result.id)));
  for (const Evidence& line : evidence(result)) {
    out += labelled(line.label, wrap_words(printable(line.text, true), width), paint);
  }
  if (!result.replay.empty()) {
    out += labelled("replay", wrap_command(printable(result.replay), width), paint);
  }
  return out + "\n";
}

std::string failures(const Verdict& verdict, int max_failures, const Paint& paint) {
  std::string out;
  int printed = 0, left_out = 0;
  for (const CaseResult& result : verdict.cases) {
    if (result.status != Status::kFail && result.status != Status::kError) continue;
    if (max_failures >= 0 && printed >= max_failures) {
      ++left_out;
      continue;
    }
    ++printed;
    out += failure(result, paint);
  }
  if (left_out > 0) {
    out += fmt::format("{} not shown; --json FILE or --html FILE writes all of them\n\n",
                       count_of(left_out, printed > 0 ? "more failing case" : "failing case"));
  }
  return out;
}

// Cases that asked published tests: ours and theirs side by side, on the same numbers.
std::string peers(const Verdict& verdict, const Paint& paint) {
  std::string out;
  for (const CaseResult& result : verdict.cases) {
    if (result.peers.empty()) continue;
    out += fmt::format("{} {}\n", paint.by_status(result.status, to_string(result.status)),
                       printable(result.id));
    for (const PeerVerdict& peer : result.peers) {
      const std::string text =
          fmt::format("{}: {}, {}", peer.test, peer.accepts ? "accepts" : "refuses", peer.evidence);
      out += labelled(&peer == &result.peers.front() ? "published" : "",
                      wrap_words(printable(text), kWidth - kLabelWidth - 2), paint);
    }
  }
  return out.empty() ? out : out + "\n";
}

}  // namespace

std::string to_terminal(const Verdict& verdict, const TerminalOptions& options) {
  const Paint paint(options.color);
  std::string last = paint.by_status(verdict.status(), outcome_line(verdict, kWidth)) + "\n";
  if (options.quiet) return last;
  const Summary summary = summarize(verdict);
  return table(verdict, summary, paint) + skips(summary) +
         failures(verdict, options.max_failures, paint) + peers(verdict, paint) + last;
}

}  // namespace shardproof::verify
