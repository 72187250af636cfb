#include "verify/verdict/evidence.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "verify/verdict/summary.h"
#include "verify/verdict/text.h"

namespace shardproof::verify {
namespace {

constexpr std::size_t kAlsoWrongListed = 4;

void append_clause(std::string& sentence, const std::string& clause) {
  if (!clause.empty()) sentence += "; " + clause;
}

// "3 of 9 tensors: image.v:grad (126), ..." without the first wrong one.
std::string also_wrong_text(const CaseResult& result, const TensorResult* first) {
  std::vector<std::string> names;
  std::size_t wrong = 0;
  for (const TensorResult& tensor : result.tensors) {
    if (tensor.status != Status::kFail || &tensor == first) continue;
    if (++wrong > kAlsoWrongListed) continue;
    names.push_back(tensor.limit == 0 ? fmt::format("{} ({:.1e})", tensor.name, tensor.error)
                                      : fmt::format("{} ({} x its limit)", tensor.name,
                                                    quotient_text(limit_quotient(tensor))));
  }
  if (wrong == 0) return "";
  if (wrong > kAlsoWrongListed) names.push_back("...");
  return fmt::format("{} of {}: {}", with_thousands(static_cast<int64_t>(wrong)),
                     count_of(static_cast<int64_t>(result.tensors.size()), "tensor"),
                     join(names, ", "));
}

const CaseResult* first_with(const Verdict& verdict, Status status) {
  auto found = std::find_if(verdict.cases.begin(), verdict.cases.end(),
                            [&](const CaseResult& result) { return result.status == status; });
  return found == verdict.cases.end() ? nullptr : &*found;
}

// "image.k:grad, attention/...": where to look first.
std::string place(const std::string& what, const CaseResult& result) {
  return what.empty() ? result.id : what + ", " + result.id;
}

// The parts of the last line; what is least needed is left out first where the line is too long.
struct Outcome {
  std::string head;  // always there
  std::string detail;
  std::string opening, place, closing;  // go together; the place is shortened first
};

std::string cases_text(const Verdict::Counts& n) {
  std::string text = count_of(n.pass + n.fail + n.error, "case");
  if (n.skip > 0) text += fmt::format(" ({} skipped)", with_thousands(n.skip));
  return text;
}

Outcome holding(const Verdict& verdict) {
  const Summary summary = summarize(verdict);
  Outcome outcome;
  outcome.head = fmt::format("holds: {}, {}", cases_text(verdict.counts()),
                             count_of(summary.tensors, "tensor"));
  if (!summary.worst.tensor) return outcome;
  outcome.detail =
      fmt::format(", worst error {} of its limit", quotient_text(summary.worst.quotient));
  outcome.opening = " (";
  outcome.place = place(summary.worst.tensor->name, *summary.worst.in_case);
  outcome.closing = ")";
  return outcome;
}

Outcome violated(const Verdict& verdict) {
  const Verdict::Counts n = verdict.counts();
  const CaseResult& first = *first_with(verdict, Status::kFail);
  const TensorResult* tensor = first_wrong_tensor(first);
  Outcome outcome;
  outcome.head = fmt::format("VIOLATED: {} of {}", with_thousands(n.fail), cases_text(n));
  outcome.opening = ", first ";
  outcome.place = place(tensor ? tensor->name : "", first);
  return outcome;
}

Outcome erring(const Verdict& verdict) {
  const Verdict::Counts n = verdict.counts();
  Outcome outcome;
  if (verdict.cases.empty()) {
    outcome.head = "ERROR: no case was run";
  } else if (n.error == 0) {
    outcome.head = fmt::format("ERROR: no case was judged ({} skipped)", with_thousands(n.skip));
  } else {
    outcome.head =
        fmt::format("ERROR: {} of {} not judged", with_thousands(n.error), cases_text(n));
    if (n.fail > 0) outcome.head += fmt::format(", {} violated", with_thousands(n.fail));
    outcome.opening = ", first ";
    outcome.place = first_with(verdict, Status::kError)->id;
  }
  return outcome;
}

Outcome outcome_of(const Verdict& verdict) {
  const Status status = verdict.status();
  if (status == Status::kError) return erring(verdict);
  return status == Status::kFail ? violated(verdict) : holding(verdict);
}

}  // namespace

std::string seconds_text(double seconds) {
  return fmt::format("{:.{}f} s", seconds, seconds < 1 ? 2 : seconds < 100 ? 1 : 0);
}

std::string quotient_text(double quotient) {
  if (!std::isfinite(quotient)) return fmt::format("{}", quotient);
  if (quotient >= 999.5) return fmt::format("{:.1e}", quotient);
  if (quotient >= 99.95) return fmt::format("{:.0f}", quotient);
  if (quotient >= 9.995) return fmt::format("{:.1f}", quotient);
  // Beside 1, two decimals would hide on which side of the limit the error is.
  if (std::abs(quotient - 1) < 0.005) return fmt::format("{:.4f}", quotient);
  if (quotient >= 0.0995 || quotient == 0) return fmt::format("{:.2f}", quotient);
  return fmt::format("{:.1e}", quotient);
}

std::string error_text(const TensorResult& tensor) {
  const double quotient = limit_quotient(tensor);
  const std::string reference = fmt::format("(reference error {:.3e})", tensor.reference_error);
  if (!std::isfinite(tensor.error)) {
    return fmt::format("error {}, limit {:.3e} {}", tensor.error, tensor.limit, reference);
  }
  if (tensor.limit == 0 && tensor.error > 0) {
    return fmt::format("error {:.3e} where equality is demanded {}", tensor.error, reference);
  }
  return fmt::format("error {:.3e} is {}{} its limit {:.3e} {}", tensor.error,
                     quotient_text(quotient), quotient > 1 ? " times" : " of", tensor.limit,
                     reference);
}

std::string ratio_text(const TensorResult& tensor) {
  // Written so that a ratio that is NaN is off.
  if (std::abs(tensor.ratio - 1) <= tensor.ratio_limit) return "";
  const bool plain = std::abs(tensor.ratio) >= 0.01 && std::abs(tensor.ratio) < 1000;
  const bool near = std::abs(tensor.ratio - 1) < 0.01;
  const std::string ratio = near    ? fmt::format("{:.6f}", tensor.ratio)
                            : plain ? fmt::format("{:.3f}", tensor.ratio)
                                    : fmt::format("{:.3e}", tensor.ratio);
  return fmt::format("ratio {} of the reference (allowed 1 +- {:.1e})", ratio, tensor.ratio_limit);
}

std::string location_text(const TensorResult& tensor) {
  if (!tensor.where) return "";
  std::vector<std::string> parts;
  const Location& where = *tensor.where;
  if (where.rank >= 0) parts.push_back(fmt::format("rank {}", where.rank));
  if (where.head >= 0) parts.push_back(fmt::format("head {}", where.head));
  if (where.token_begin >= 0) {
    parts.push_back(fmt::format("tokens [{}, {})", where.token_begin, where.token_end));
  }
  return join(parts, ", ");
}

std::string explanation_text(const TensorResult& tensor) {
  const std::string at =
      tensor.max_abs_index.empty() ? "" : fmt::format(" at {}", tensor.max_abs_index);
  return fmt::format("largest difference {:.2e}{}, cosine {:.6f}", tensor.max_abs, at,
                     tensor.cosine);
}

std::string shape_text(const TensorResult& tensor) {
  return fmt::format("{} {}", tensor.shape, tensor.dtype);
}

std::string headline(const CaseResult& result) {
  if (result.status == Status::kSkip || result.status == Status::kError) return result.reason;
  if (const TensorResult* tensor = first_wrong_tensor(result)) {
    std::string sentence = tensor->name + ": " + error_text(*tensor);
    append_clause(sentence, ratio_text(*tensor));
    append_clause(sentence, location_text(*tensor));
    return sentence;
  }
  for (const CheckResult& check : result.checks) {
    if (check.status == Status::kFail) return check.name + ": " + check.detail;
  }
  return result.reason;
}

std::vector<Evidence> evidence(const CaseResult& result) {
  std::vector<Evidence> lines;
  auto add = [&](std::string_view label, const std::string& text) {
    if (!text.empty()) lines.push_back({label, text});
  };
  add("reason", result.reason);
  const TensorResult* first = first_wrong_tensor(result);
  if (first) {
    add("first wrong", first->name + " " + shape_text(*first));
    add("", error_text(*first));
    add("", ratio_text(*first));
    add("", location_text(*first));
    add("", explanation_text(*first));
  }
  add("also wrong", also_wrong_text(result, first));
  for (const CheckResult& check : result.checks) {
    if (check.status == Status::kFail) add("check", check.name + ": " + check.detail);
    if (check.status == Status::kError) add("check", check.name + " (error): " + check.detail);
  }
  for (const Hypothesis& hypothesis : result.hypotheses) {
    add("hypothesis", hypothesis.kind + ": " + hypothesis.text);
    if (!hypothesis.evidence.empty()) add("", "evidence: " + hypothesis.evidence);
  }
  return lines;
}

std::string outcome_line(const Verdict& verdict, std::size_t width) {
  constexpr std::size_t kLeastPlace = 12;  // a shorter rest of a name tells nothing
  const Outcome outcome = outcome_of(verdict);
  const std::string facts = fmt::format(", {}, seed {}, commit {}", seconds_text(verdict.seconds),
                                        verdict.seed, printable(verdict.commit.substr(0, 7)));
  const std::string judgement = outcome.head + outcome.detail;
  if (columns(judgement + facts) > width) return outcome.head + facts;
  const std::size_t taken = columns(judgement + outcome.opening + outcome.closing + facts);
  const std::string name = printable(outcome.place);
  if (name.empty() || taken + std::min(kLeastPlace, columns(name)) > width) {
    return judgement + facts;
  }
  return judgement + outcome.opening + elide_end(name, width - taken) + outcome.closing + facts;
}

}  // namespace shardproof::verify
