#include "verify/verdict/junit_writer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "verify/verdict/evidence.h"
#include "verify/verdict/summary.h"
#include "verify/verdict/text.h"

namespace shardproof::verify {
namespace {

struct Suite {
  std::string name;
  std::vector<const CaseResult*> cases;
};

// In the order in which the cases name them.
std::vector<Suite> by_suite(const Verdict& verdict) {
  std::vector<Suite> suites;
  for (const CaseResult& result : verdict.cases) {
    const std::string name = split_case_id(result.id).suite;
    auto found = std::find_if(suites.begin(), suites.end(),
                              [&](const Suite& suite) { return suite.name == name; });
    if (found == suites.end()) found = suites.insert(suites.end(), {name, {}});
    found->cases.push_back(&result);
  }
  return suites;
}

// xs:decimal: neither exponents nor inf.
std::string decimal(double seconds) {
  return fmt::format("{:.3f}", std::isfinite(seconds) ? seconds : 0.0);
}

std::string counts_attributes(const std::vector<const CaseResult*>& cases) {
  int fail = 0, error = 0, skip = 0;
  double seconds = 0;
  for (const CaseResult* result : cases) {
    fail += result->status == Status::kFail;
    error += result->status == Status::kError;
    skip += result->status == Status::kSkip;
    seconds += result->seconds;
  }
  return fmt::format(R"(tests="{}" failures="{}" errors="{}" skipped="{}" time="{}")", cases.size(),
                     fail, error, skip, decimal(seconds));
}

std::string body(const CaseResult& result) {
  std::string text;
  for (const Evidence& line : evidence(result)) {
    text += fmt::format("{:<12}{}\n", line.label, line.text);
  }
  if (!result.replay.empty()) text += fmt::format("{:<12}{}\n", "replay", result.replay);
  return text;
}

std::string outcome(const CaseResult& result) {
  const std::string message = escape_attribute(headline(result));
  switch (result.status) {
    case Status::kPass:
      return "";
    case Status::kSkip:
      return fmt::format("      <skipped message=\"{}\"/>\n", message);
    case Status::kFail:
      return fmt::format("      <failure type=\"violation\" message=\"{}\">{}</failure>\n", message,
                         escape_text(body(result)));
    case Status::kError:
      return fmt::format("      <error type=\"error\" message=\"{}\">{}</error>\n", message,
                         escape_text(body(result)));
  }
  return "";
}

std::string testcase(const CaseResult& result) {
  const CaseName name = split_case_id(result.id);
  const std::string group = name.suite + "." + name.subject + "." + name.mode;
  const std::string tag =
      fmt::format("    <testcase classname=\"{}\" name=\"{}\" time=\"{}\"", escape_attribute(group),
                  escape_attribute(result.id), decimal(result.seconds));
  const std::string inner = outcome(result);
  return inner.empty() ? tag + "/>\n" : tag + ">\n" + inner + "    </testcase>\n";
}

std::string property(const std::string& name, const std::string& value) {
  return fmt::format("      <property name=\"{}\" value=\"{}\"/>\n", escape_attribute(name),
                     escape_attribute(value));
}

std::string properties(const Verdict& verdict) {
  std::string out = "    <properties>\n" + property("commit", verdict.commit) +
                    property("command", verdict.command) +
                    property("seed", fmt::format("{}", verdict.seed));
  for (const auto& [key, value] : verdict.machine) out += property("machine." + key, value);
  return out + "    </properties>\n";
}

// JUnit's schema wants the time without a zone.
std::string timestamp(std::string started) {
  if (started.ends_with('Z')) started.pop_back();
  return escape_attribute(started);
}

}  // namespace

std::string to_junit(const Verdict& verdict) {
  std::vector<const CaseResult*> all;
  for (const CaseResult& result : verdict.cases) all.push_back(&result);
  std::string out = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n";
  out += fmt::format("<testsuites name=\"shardproof\" {}>\n", counts_attributes(all));
  for (const Suite& suite : by_suite(verdict)) {
    out +=
        fmt::format("  <testsuite name=\"{}\" {} timestamp=\"{}\">\n", escape_attribute(suite.name),
                    counts_attributes(suite.cases), timestamp(verdict.started));
    out += properties(verdict);
    for (const CaseResult* result : suite.cases) out += testcase(*result);
    out += "  </testsuite>\n";
  }
  return out + "</testsuites>\n";
}

}  // namespace shardproof::verify
