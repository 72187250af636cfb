// The verdict and its writers for machines and browsers; the terminal has its own test.
#include "verify/verdict/verdict.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/catch.h"
#include "tests/verify/verdict_samples.h"
#include "verify/verdict/histogram.h"
#include "verify/verdict/html_writer.h"
#include "verify/verdict/json_writer.h"
#include "verify/verdict/junit_writer.h"
#include "verify/verdict/summary.h"
#include "verify/verdict/terminal_writer.h"

namespace shardproof::verify {
namespace {

using Json = nlohmann::ordered_json;

// True if xmllint accepts `xml`, or there is no xmllint.
bool well_formed(const std::string& xml) {
  if (std::system("xmllint --version > /dev/null 2>&1") != 0) {
    WARN("xmllint is not installed: well-formedness is not checked");
    return true;
  }
  const std::filesystem::path file = std::filesystem::temp_directory_path() /
                                     fmt::format("shardproof_verdict_test_{}.xml", getpid());
  std::ofstream(file) << xml;
  const bool good =
      std::system(fmt::format("xmllint --noout --nonet '{}'", file.string()).c_str()) == 0;
  std::filesystem::remove(file);
  return good;
}

}  // namespace

TEST_CASE("conclude derives status and first wrong tensor", "[verdict]") {
  CaseResult result = failing_case();
  REQUIRE(result.status == Status::kFail);
  REQUIRE(result.first_wrong == "image.k:grad");

  SECTION("a failing check alone fails the case and names no tensor") {
    CaseResult check_only = passing_case("a/b/c/d/e/f");
    check_only.checks.push_back({"deadlock", Status::kFail, "ranks 0 and 1 wait for each other"});
    check_only.conclude();
    REQUIRE(check_only.status == Status::kFail);
    REQUIRE(check_only.first_wrong.empty());
  }
  SECTION("an erring part outranks a failing one, but the wrong tensor stays named") {
    result.checks.push_back({"memory", Status::kError, "no counters"});
    result.conclude();
    REQUIRE(result.status == Status::kError);
    REQUIRE(result.first_wrong == "image.k:grad");
    REQUIRE(!result.reason.empty());
  }
  SECTION("skip and error stay") {
    CaseResult skipped = skipped_case();
    skipped.conclude();
    REQUIRE(skipped.status == Status::kSkip);
    CaseResult erring = erring_case();
    erring.tensors = {passing_tensor("output", 0, 1)};
    erring.conclude();
    REQUIRE(erring.status == Status::kError);
  }
  SECTION("a case that compared nothing is an error") {
    CaseResult empty;
    empty.conclude();
    REQUIRE(empty.status == Status::kError);
    REQUIRE(contains(empty.reason, "nothing was compared"));
  }
  SECTION("a case whose parts were all skipped is a skip") {
    CaseResult skipped;
    skipped.checks = {{"memory", Status::kSkip, ""}};
    skipped.conclude();
    REQUIRE(skipped.status == Status::kSkip);
  }
  SECTION("an error that is NaN cannot pass") {
    CaseResult with_nan = passing_case("a/b/c/d/e/f");
    with_nan.tensors[0].error = kNan;
    with_nan.conclude();
    REQUIRE(with_nan.status == Status::kFail);
    REQUIRE(with_nan.first_wrong == "output");
  }
  SECTION("concluding again after a repair passes") {
    result.tensors[1].status = result.tensors[2].status = Status::kPass;
    result.checks.clear();
    result.conclude();
    REQUIRE(result.status == Status::kPass);
    REQUIRE(result.first_wrong.empty());
  }
}

TEST_CASE("the status of a verdict follows its cases", "[verdict]") {
  REQUIRE(holding_verdict().status() == Status::kPass);
  REQUIRE(violated_verdict().status() == Status::kFail);
  REQUIRE(mixed_verdict().status() == Status::kError);
  REQUIRE(verdict_of({}).status() == Status::kError);
  REQUIRE(verdict_of({skipped_case()}).status() == Status::kError);
  const Verdict::Counts counts = mixed_verdict().counts();
  REQUIRE(counts.pass == 3);
  REQUIRE(counts.fail == 1);
  REQUIRE(counts.skip == 1);
  REQUIRE(counts.error == 1);
}

TEST_CASE("limit quotients order every error", "[verdict]") {
  auto quotient = [](double error, double limit) {
    return limit_quotient(passing_tensor("t", error, limit));
  };
  REQUIRE(quotient(1, 2) == 0.5);
  REQUIRE(quotient(0, 0) == 0);
  REQUIRE(quotient(1e-30, 0) == kInf);
  REQUIRE(quotient(kNan, 1) == kInf);
  REQUIRE(quotient(kInf, kInf) == kInf);
  REQUIRE(quotient(1, kNan) == kInf);
  REQUIRE(quotient(1, kInf) == 0);
}

TEST_CASE("case ids are split into their parts", "[verdict]") {
  const CaseName name =
      split_case_id("attention/joint/hybrid/dp1.ring2.ulysses2/bf16/ragged/left#17");
  REQUIRE(name.suite == "attention");
  REQUIRE(name.subject == "joint");
  REQUIRE(name.mode == "hybrid");
  REQUIRE(name.mesh == "dp1.ring2.ulysses2");
  REQUIRE(name.dtype == "bf16");
  REQUIRE(name.variant == "ragged/left#17");
  REQUIRE(split_case_id("alone").suite == "alone");
  REQUIRE(split_case_id("alone").subject.empty());
  REQUIRE(split_case_id("").suite.empty());
}

TEST_CASE("JSON carries every field in the order of the format", "[verdict][json]") {
  const Json json = Json::parse(to_json(mixed_verdict()));
  auto keys = [](const Json& object) {
    std::string all;
    for (const auto& [key, value] : object.items()) all += key + " ";
    return all;
  };
  REQUIRE(keys(json) ==
          "format version commit command seed machine started seconds status counts cases ");
  REQUIRE(json["format"] == "shardproof-verdict");
  REQUIRE(json["version"] == 1);
  REQUIRE(json["commit"] == "abc1234def");
  REQUIRE(json["command"] == "shardproof verify attention --quick");
  REQUIRE(json["seed"] == 1);
  REQUIRE(json["machine"] == Json({{"cores", "2"}, {"device", "cpu"}}));
  REQUIRE(json["started"] == "2025-06-01T12:00:00Z");
  REQUIRE(json["seconds"] == 1.7);
  REQUIRE(json["status"] == "error");
  REQUIRE(json["counts"].dump() == R"({"pass":3,"fail":1,"skip":1,"error":1})");
  REQUIRE(json["cases"].size() == 6);

  const Json& failing = json["cases"][3];
  REQUIRE(keys(failing) ==
          "id status seconds reason tensors checks first_wrong hypotheses replay ");
  REQUIRE(failing["id"] == "attention/joint/hybrid/dp1.ring2.ulysses2/bf16/ragged#17");
  REQUIRE(failing["status"] == "fail");
  REQUIRE(failing["seconds"] == 0.02);
  REQUIRE(failing["reason"] == "");
  REQUIRE(failing["first_wrong"] == "image.k:grad");
  REQUIRE(failing["replay"] == failing_case().replay);

  const Json& tensor = failing["tensors"][1];
  REQUIRE(keys(tensor) ==
          "name shape dtype status error reference_error limit ratio ratio_limit cosine max_abs "
          "where ");
  REQUIRE(tensor["name"] == "image.k:grad");
  REQUIRE(tensor["shape"] == Json({2, 96, 8, 64}));
  REQUIRE(tensor["dtype"] == "bf16");
  REQUIRE(tensor["status"] == "fail");
  REQUIRE(tensor["error"] == 0.4998);
  REQUIRE(tensor["reference_error"] == 0.0019875);
  REQUIRE(tensor["limit"] == 0.003975);
  REQUIRE(tensor["ratio"] == 0.5);
  REQUIRE(tensor["ratio_limit"] == 2.1e-4);
  REQUIRE(tensor["cosine"] == 0.99999);
  REQUIRE(tensor["max_abs"].dump() == R"({"value":1.25,"index":[0,17,3,5]})");
  REQUIRE(tensor["where"].dump() == R"({"rank":1,"head":3,"tokens":[16,32]})");
  REQUIRE(failing["tensors"][0]["where"].is_null());

  REQUIRE(failing["checks"][0].dump() ==
          R"({"name":"trace","status":"pass","detail":"24 collectives match"})");
  REQUIRE(failing["checks"][1]["status"] == "fail");
  REQUIRE(keys(failing["hypotheses"][0]) == "class text evidence ");
  REQUIRE(failing["hypotheses"][0]["class"] == "missing_gradient_factor");
  REQUIRE(failing["hypotheses"][0]["evidence"] == "ratio 0.500 = 1/sp at sp 2");

  REQUIRE(json["cases"][4]["status"] == "skip");
  REQUIRE(json["cases"][4]["reason"] == "needs a CUDA device");
  REQUIRE(json["cases"][4]["tensors"].is_array());
  REQUIRE(json["cases"][4]["checks"].is_array());
  REQUIRE(json["cases"][5]["status"] == "error");
}

TEST_CASE("JSON writes numbers that it has not as strings", "[verdict][json]") {
  Verdict verdict = violated_verdict();
  TensorResult& tensor = verdict.cases[3].tensors[1];
  tensor.error = kNan;
  tensor.reference_error = kInf;
  tensor.limit = -kInf;
  tensor.max_abs = kInf;
  tensor.where = Location{.rank = 2};
  verdict.seed = std::numeric_limits<uint64_t>::max();
  const Json json = Json::parse(to_json(verdict));
  const Json& read = json["cases"][3]["tensors"][1];
  REQUIRE(read["error"] == "nan");
  REQUIRE(read["reference_error"] == "inf");
  REQUIRE(read["limit"] == "-inf");
  REQUIRE(read["max_abs"]["value"] == "inf");
  REQUIRE(read["where"].dump() == R"({"rank":2,"head":null,"tokens":null})");
  REQUIRE(json["seed"].get<uint64_t>() == verdict.seed);
}

TEST_CASE("JSON survives names that are not UTF-8, and keeps doubles exactly", "[verdict][json]") {
  Verdict verdict = violated_verdict();
  verdict.cases[0].id = kHostile;
  verdict.cases[0].tensors[0].error = 0.1 + 0.2;
  const Json json = Json::parse(to_json(verdict));
  REQUIRE(contains(json["cases"][0]["id"], "a<b>&\"c\"'d'\x1b[31m\x01"));
  REQUIRE(json["cases"][0]["tensors"][0]["error"].get<double>() == 0.1 + 0.2);
}

TEST_CASE("JUnit has a suite per suite and a testcase per case", "[verdict][junit]") {
  const std::string xml = to_junit(mixed_verdict());
  REQUIRE(well_formed(xml));
  REQUIRE(contains(xml, R"(<testsuites name="shardproof" tests="6" failures="1" errors="1")"));
  REQUIRE(contains(xml, R"(<testsuite name="attention" tests="5" failures="1" errors="0")"));
  REQUIRE(contains(xml, R"(<testsuite name="model" tests="1" failures="0" errors="1")"));
  REQUIRE(contains(xml, R"(<failure type="violation" message="image.k:grad: error 4.998e-01 is )"
                        R"(126 times its limit 3.975e-03 (reference error 1.988e-03); ratio 0.500 )"
                        R"(of the reference (allowed 1 +- 2.1e-04); rank 1, head 3, )"
                        "tokens [16, 32)\">"));
  REQUIRE(contains(xml, R"(<skipped message="needs a CUDA device"/>)"));
  REQUIRE(contains(xml, R"(<error type="error" message="goldens/flux is missing)"));
  REQUIRE(contains(xml, "replay      ./shardproof verify --case &#39;attention/joint/hybrid"));
  REQUIRE(contains(xml, R"(<property name="seed" value="1"/>)"));
  REQUIRE(contains(xml, R"(timestamp="2025-06-01T12:00:00")"));
}

TEST_CASE("JUnit names the failing check where no tensor is wrong", "[verdict][junit]") {
  CaseResult result = passing_case("attention/joint/ring/dp1.ring2.ulysses1/fp32/plain");
  result.checks.push_back({"deadlock", Status::kFail, "ranks 0 and 1 wait for each other"});
  result.conclude();
  REQUIRE(contains(to_junit(verdict_of({result})),
                   R"(message="deadlock: ranks 0 and 1 wait for each other")"));
}

TEST_CASE("hostile names leave every format whole", "[verdict]") {
  Verdict verdict = mixed_verdict();
  verdict.commit = verdict.command = verdict.started = kHostile;
  verdict.machine[kHostile] = kHostile;
  for (CaseResult& result : verdict.cases) {
    result.id = kHostile + "/" + kHostile + "/" + result.id;
    result.reason = result.replay = kHostile;
    for (TensorResult& tensor : result.tensors) tensor.name = tensor.dtype = kHostile;
    for (CheckResult& check : result.checks) check.name = check.detail = kHostile;
    result.hypotheses.push_back({kHostile, kHostile, kHostile});
  }
  verdict.seconds = kNan;
  REQUIRE(well_formed(to_junit(verdict)));
  REQUIRE(Json::accept(to_json(verdict)));
  for (const std::string& text :
       {to_junit(verdict), to_html(verdict), to_terminal(verdict, {.max_failures = -1})}) {
    for (const char byte : {'\x1b', '\x01', '\x7f', '\r', '\xff', '\t'}) {
      INFO("byte " << int{byte});
      REQUIRE(text.find(byte) == std::string::npos);
    }
    REQUIRE(contains(text, "\\x1B[31m\\x01\\x7F"));
    REQUIRE(contains(text, "\\u0085\\u202E\\uFFFF"));
  }
  REQUIRE(!contains(to_html(verdict), "a<b>"));
}

TEST_CASE("the histogram holds every judged tensor once", "[verdict][html]") {
  CaseResult result = passing_case("a/b/c/d/e/f");
  result.tensors.clear();
  for (const double error :
       {0.0, 0.049, 0.05, 0.999, 1.0, 1.001, 2.0, 2.5, 50.0, 1e9, kNan, kInf}) {
    result.tensors.push_back(passing_tensor("t", error, 1));
  }
  result.tensors.push_back(passing_tensor("skipped", 5, 1));
  result.tensors.back().status = Status::kSkip;
  const std::vector<QuotientBin> bins = quotient_histogram(verdict_of({result}));
  std::vector<int64_t> filled;
  for (const QuotientBin& bin : bins) filled.push_back(bin.tensors);
  REQUIRE(bins.size() == 24);
  REQUIRE(filled[0] == 2);
  REQUIRE(filled[1] == 1);
  REQUIRE(std::vector<int64_t>(filled.begin() + 19, filled.end()) ==
          std::vector<int64_t>{2, 2, 1, 1, 3});
  REQUIRE(well_formed(histogram_svg(bins)));
}

TEST_CASE("the HTML page is self-contained and unfolds what failed", "[verdict][html]") {
  const std::string html = to_html(mixed_verdict());
  for (const char* outside : {"<script", "src=", "href=", "http:", "https:", "@import", "url("}) {
    INFO(outside);
    REQUIRE(!contains(html, outside));
  }
  REQUIRE(contains(html, "<svg"));
  REQUIRE(contains(html, "prefers-color-scheme: dark"));
  REQUIRE(contains(html,
                   "<details open><summary><strong class=\"fail\">fail</strong> "
                   "<code>attention/joint/hybrid/dp1.ring2.ulysses2/bf16/ragged#17</code>"));
  REQUIRE(contains(html, "<details open><summary><strong class=\"error\">"));
  REQUIRE(contains(html, "<details><summary><strong class=\"pass\">"));
  REQUIRE(contains(html, "ratio 0.500 of the reference"));
  REQUIRE(contains(html, "missing_gradient_factor"));
  REQUIRE(contains(html, "--device cpu --transport sim --seed 1"));
  // But for <meta> and the bare `open` the page happens to be XML: xmllint can check its nesting.
  std::string as_xml = html.substr(html.find("<body>"));
  as_xml.erase(as_xml.find("</html>"));
  const std::string open = "<details open>";
  for (std::size_t at; (at = as_xml.find(open)) != std::string::npos;) {
    as_xml.replace(at, open.size(), "<details open=\"\">");
  }
  REQUIRE(well_formed(as_xml));
}

}  // namespace shardproof::verify
