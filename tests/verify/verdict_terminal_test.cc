// What the terminal shows of a verdict: a golden transcript, and the sentences it is made of.
#include "verify/verdict/terminal_writer.h"

#include <algorithm>

#include "tests/catch.h"
#include "tests/verify/verdict_samples.h"
#include "verify/verdict/evidence.h"
#include "verify/verdict/text.h"

namespace shardproof::verify {

TEST_CASE("a clean text is printed as it is", "[verdict]") {
  REQUIRE(printable("transformer_blocks.3/attn'~ \xc3\xa9 \xf0\x9f\x99\x82") ==
          "transformer_blocks.3/attn'~ \xc3\xa9 \xf0\x9f\x99\x82");
  REQUIRE(printable("a\nb") == "a\\nb");
  REQUIRE(printable("a\nb", true) == "a\nb");
  REQUIRE(printable("\xf4\x90\x80\x80 \xe2\x82") == "\\xF4\\x90\\x80\\x80 \\xE2\\x82");
  REQUIRE(escape_attribute("<a href=\"x\">&'\n") == "&lt;a href=&quot;x&quot;&gt;&amp;&#39;&#10;");
  REQUIRE(escape_text("<\n>") == "&lt;\n&gt;");
}

TEST_CASE("texts are cut and wrapped by columns", "[verdict]") {
  REQUIRE(columns("\xc3\xa9tude") == 5);
  REQUIRE(elide_middle("abcdefghij", 10) == "abcdefghij");
  REQUIRE(elide_middle("abcdefghijk", 10) == "abcd...ijk");
  REQUIRE(elide_end("abcdefghijk", 10) == "abcdefg...");
  REQUIRE(elide_end("\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9", 5) ==
          "\xc3\xa9\xc3\xa9...");
  REQUIRE(wrap_words("one two three", 7) == std::vector<std::string>{"one two", "three"});
  REQUIRE(wrap_words("one\ntwo", 7) == std::vector<std::string>{"one", "two"});
  REQUIRE(wrap_words("abcdefghij", 4) == std::vector<std::string>{"abcd", "efgh", "ij"});
  REQUIRE(wrap_words("", 4) == std::vector<std::string>{""});
  REQUIRE(with_thousands(0) == "0");
  REQUIRE(with_thousands(999) == "999");
  REQUIRE(with_thousands(1000) == "1,000");
  REQUIRE(with_thousands(-1234567) == "-1,234,567");
  REQUIRE(count_of(1, "case") == "1 case");
  REQUIRE(count_of(0, "case") == "0 cases");
}

TEST_CASE("wrapped commands paste back as the same command", "[verdict]") {
  const std::string command =
      "shardproof verify --case 'a b/c  d' --note \"it's a \\\" quote\" --seed 1 x\\ y";
  const std::vector<std::string> lines = wrap_command(command, 20);
  REQUIRE(lines.size() > 3);
  std::string pasted;
  for (const std::string& line : lines) {
    const bool continued = line.ends_with(" \\");
    REQUIRE(continued == (&line != &lines.back()));
    pasted += continued ? line.substr(0, line.size() - 1) : line;
  }
  REQUIRE(pasted == command);
  REQUIRE(wrap_command("short one", 20) == std::vector<std::string>{"short one"});
}

TEST_CASE("the terminal text is what an engineer reads", "[verdict][terminal]") {
  const std::string expected = R"(
suite      mode     dtype  cases  pass  fail  skip  error  worst/limit  where
attention  ulysses  bf16       2     2     0     0      0         0.81  image.q:grad in jo...g1.ulysses2/plain
attention  ring     fp32       1     1     0     0      0         0.81  image.q:grad in jo...g2.ulysses1/plain
attention  hybrid   bf16       1     0     1     0      0          126  image.k:grad in jo...lysses2/ragged#17
attention  ring     fp16       1     0     0     1      0            -  -
model      ulysses  fp32       1     0     0     0      1            -  -

skipped 1 case: needs a CUDA device

FAIL attention/joint/hybrid/dp1.ring2.ulysses2/bf16/ragged#17
  first wrong  image.k:grad [2, 96, 8, 64] bf16
               error 4.998e-01 is 126 times its limit 3.975e-03 (reference error 1.988e-03)
               ratio 0.500 of the reference (allowed 1 +- 2.1e-04)
               rank 1, head 3, tokens [16, 32)
               largest difference 1.25e+00 at [0, 17, 3, 5], cosine 0.999990
  also wrong   1 of 3 tensors: image.v:grad (2.00 x its limit)
  check        rng: ranks 0 and 1 of group ulysses drew different dropout masks at tag
               transformer_blocks.3/attn.dropout, where they must draw the same
  hypothesis   missing_gradient_factor: the gradient of image.k is half of the reference: a factor sp is
               missing
               evidence: ratio 0.500 = 1/sp at sp 2
  replay       ./shardproof verify --case 'attention/joint/hybrid/dp1.ring2.ulysses2/bf16/ragged#17' \
               --device cpu --transport sim --seed 1

ERROR model/flux/ulysses/dp1.ring1.ulysses2/fp32/small
  reason       goldens/flux is missing model.safetensors
  replay       ./shardproof verify --case model/flux/ulysses/dp1.ring1.ulysses2/fp32/small

ERROR: 1 of 5 cases (1 skipped) not judged, 1 violated, first model/flux/uly..., 1.7 s, seed 1, commit abc1234
)";
  REQUIRE("\n" + to_terminal(mixed_verdict(), {}) == expected);
}

TEST_CASE("the last line tells the outcome", "[verdict][terminal]") {
  auto last = [](const Verdict& verdict) { return to_terminal(verdict, {.quiet = true}); };
  REQUIRE(last(holding_verdict()) ==
          "holds: 3 cases, 6 tensors, worst error 0.81 of its limit (image.q:grad, att...), 1.7 s, "
          "seed 1, commit abc1234\n");
  REQUIRE(last(violated_verdict()) ==
          "VIOLATED: 1 of 4 cases (1 skipped), first image.k:grad, attention/joint/hybr..., 1.7 s, "
          "seed 1, commit abc1234\n");
  REQUIRE(last(mixed_verdict()) ==
          "ERROR: 1 of 5 cases (1 skipped) not judged, 1 violated, first model/flux/uly..., 1.7 s, "
          "seed 1, commit abc1234\n");
  REQUIRE(last(verdict_of({})) == "ERROR: no case was run, 1.7 s, seed 1, commit abc1234\n");
  REQUIRE(last(verdict_of({skipped_case()})) ==
          "ERROR: no case was judged (1 skipped), 1.7 s, seed 1, commit abc1234\n");
}

TEST_CASE("a long last line drops names before numbers", "[verdict][terminal]") {
  Verdict verdict = holding_verdict();
  verdict.seed = std::numeric_limits<uint64_t>::max();
  REQUIRE(to_terminal(verdict, {.quiet = true}) ==
          "holds: 3 cases, 6 tensors, worst error 0.81 of its limit, 1.7 s, "
          "seed 18446744073709551615, commit abc1234\n");
  REQUIRE(contains(outcome_line(verdict, 1000), verdict.cases[0].id));
}

TEST_CASE("the terminal keeps to its width", "[verdict][terminal]") {
  Verdict verdict = mixed_verdict();
  for (CaseResult& result : verdict.cases) {
    for (TensorResult& tensor : result.tensors) tensor.name = std::string(300, 'n');
    for (CheckResult& check : result.checks) check.detail = std::string(300, 'd');
  }
  for (const std::string& line : lines_of(to_terminal(verdict, {}))) {
    INFO(line);
    REQUIRE(columns(line) <= 110);
  }
  for (const bool quiet : {false, true}) {
    REQUIRE(lines_of(to_terminal(verdict, {.quiet = quiet})).back().size() <= 110);
  }
}

TEST_CASE("the terminal stops after the failures that were asked for", "[verdict][terminal]") {
  Verdict verdict = holding_verdict();
  for (int i = 0; i < 5; ++i) verdict.cases.push_back(failing_case());
  auto printed = [&](int max_failures) {
    const auto lines = lines_of(to_terminal(verdict, {.max_failures = max_failures}));
    return std::count_if(lines.begin(), lines.end(),
                         [](const std::string& line) { return line.starts_with("FAIL "); });
  };
  REQUIRE(printed(2) == 2);
  REQUIRE(printed(0) == 0);
  REQUIRE(printed(-1) == 5);
  REQUIRE(contains(to_terminal(verdict, {.max_failures = 2}), "3 more failing cases not shown"));
  REQUIRE(contains(to_terminal(verdict, {.max_failures = 0}), "5 failing cases not shown"));
}

TEST_CASE("colours appear only where they are asked for", "[verdict][terminal]") {
  REQUIRE(!contains(to_terminal(mixed_verdict(), {}), "\x1b"));
  const std::string colored = to_terminal(mixed_verdict(), {.color = true});
  REQUIRE(contains(colored, "\x1b[1;31mFAIL\x1b[0m"));
  std::string bare;
  for (std::size_t i = 0; i < colored.size(); ++i) {
    if (colored[i] == '\x1b') {
      i = colored.find('m', i);
    } else {
      bare += colored[i];
    }
  }
  REQUIRE(bare == to_terminal(mixed_verdict(), {}));
}

TEST_CASE("errors and ratios are told in words", "[verdict]") {
  TensorResult tensor = passing_tensor("t", 1e-3, 0);
  tensor.reference_error = 0;
  REQUIRE(error_text(tensor) ==
          "error 1.000e-03 where equality is demanded (reference error 0.000e+00)");
  tensor.error = kNan;
  REQUIRE(error_text(tensor) == "error nan, limit 0.000e+00 (reference error 0.000e+00)");
  tensor = passing_tensor("t", 1e-3, 2e-3);
  REQUIRE(error_text(tensor) ==
          "error 1.000e-03 is 0.50 of its limit 2.000e-03 (reference error 1.000e-03)");
  REQUIRE(ratio_text(tensor).empty());
  tensor.ratio = 1.0003;
  REQUIRE(ratio_text(tensor) == "ratio 1.000300 of the reference (allowed 1 +- 2.0e-04)");
  tensor.ratio = kNan;
  REQUIRE(ratio_text(tensor) == "ratio nan of the reference (allowed 1 +- 2.0e-04)");
  tensor.where = Location{.rank = 2};
  REQUIRE(location_text(tensor) == "rank 2");
}

}  // namespace shardproof::verify
