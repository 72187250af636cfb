// Sentences about the results of a verdict, shared by the terminal, JUnit and HTML writers so that
// all three say the same. Plain text: escaping is the writers' task.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "verify/verdict/verdict.h"

namespace shardproof::verify {

// "error 4.998e-01 is 126 times its limit 3.975e-03 (reference error 1.988e-03)"
std::string error_text(const TensorResult& tensor);

// "ratio 0.500 of the reference (allowed 1 +- 2.1e-04)"; empty where the ratio is allowed.
std::string ratio_text(const TensorResult& tensor);

// "rank 1, head 3, tokens [16, 32)"; empty where nothing is known.
std::string location_text(const TensorResult& tensor);

// "largest difference 1.25e+00 at [0, 17, 3, 5], cosine 0.9998": explains, decides nothing.
std::string explanation_text(const TensorResult& tensor);

// "[2, 96, 8, 64] bf16"
std::string shape_text(const TensorResult& tensor);

// What is wrong with the case in one sentence: its first wrong tensor, else its first failing
// check, else its reason.
std::string headline(const CaseResult& result);

// One line of evidence under its label: {"first wrong", "image.k:grad ..."}. A label that repeats
// is empty.
struct Evidence {
  std::string_view label;
  std::string text;
};
// All that is known about a case that failed or erred, but for the id and the replay command.
std::vector<Evidence> evidence(const CaseResult& result);

// The last line of the terminal, e.g. "holds: 412 cases, 3,904 tensors, worst error 0.81 of its
// limit (image.k:grad, attention/joint/...), 1.7 s, seed 1, commit abc1234". At most `width`
// columns: the id of the case is shortened, then left out.
std::string outcome_line(const Verdict& verdict, std::size_t width);

// "0.02 s", "1.7 s", "312 s"
std::string seconds_text(double seconds);

// "0.81", "12.3", "126", "4.2e+05", "inf"; beside 1 "0.9987".
std::string quotient_text(double quotient);

}  // namespace shardproof::verify
