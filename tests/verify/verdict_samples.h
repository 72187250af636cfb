// A made-up verdict with a case of every status, for the tests of the verdict's writers.
#pragma once
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "verify/verdict/verdict.h"

namespace shardproof::verify {

inline constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kInf = std::numeric_limits<double>::infinity();

inline TensorResult passing_tensor(const std::string& name, double error, double limit) {
  TensorResult tensor;
  tensor.name = name;
  tensor.shape = {2, 96, 8, 64};
  tensor.dtype = "bf16";
  tensor.error = error;
  tensor.reference_error = limit / 2;
  tensor.limit = limit;
  tensor.ratio_limit = 2e-4;
  return tensor;
}

inline TensorResult halved_gradient() {
  TensorResult tensor = passing_tensor("image.k:grad", 0.4998, 0.003975);
  tensor.status = Status::kFail;
  tensor.reference_error = 0.0019875;
  tensor.ratio = 0.5;
  tensor.ratio_limit = 2.1e-4;
  tensor.cosine = 0.99999;
  tensor.max_abs = 1.25;
  tensor.max_abs_index = {0, 17, 3, 5};
  tensor.where = Location{.rank = 1, .head = 3, .token_begin = 16, .token_end = 32};
  return tensor;
}

inline CaseResult passing_case(const std::string& id) {
  CaseResult result;
  result.id = id;
  result.seconds = 0.02;
  result.tensors = {passing_tensor("output", 0.0020, 0.004),
                    passing_tensor("image.q:grad", 0.00324, 0.004)};
  result.checks = {{"trace", Status::kPass, "24 collectives match"}};
  result.replay = "shardproof verify --case '" + id + "'";
  result.conclude();
  return result;
}

inline CaseResult failing_case() {
  CaseResult result = passing_case("attention/joint/hybrid/dp1.ring2.ulysses2/bf16/ragged#17");
  result.tensors[1] = halved_gradient();
  TensorResult value = passing_tensor("image.v:grad", 0.008, 0.004);
  value.status = Status::kFail;
  result.tensors.push_back(value);
  result.checks.push_back({"rng", Status::kFail,
                           "ranks 0 and 1 of group ulysses drew different dropout masks at tag "
                           "transformer_blocks.3/attn.dropout, where they must draw the same"});
  result.hypotheses = {{"missing_gradient_factor",
                        "the gradient of image.k is half of the reference: a factor sp is missing",
                        "ratio 0.500 = 1/sp at sp 2"}};
  result.replay =
      "./shardproof verify --case 'attention/joint/hybrid/dp1.ring2.ulysses2/bf16/ragged#17' "
      "--device cpu --transport sim --seed 1";
  result.conclude();
  return result;
}

inline CaseResult skipped_case() {
  CaseResult result;
  result.id = "attention/joint/ring/dp1.ring2.ulysses1/fp16/plain";
  result.status = Status::kSkip;
  result.reason = "needs a CUDA device";
  return result;
}

inline CaseResult erring_case() {
  CaseResult result;
  result.id = "model/flux/ulysses/dp1.ring1.ulysses2/fp32/small";
  result.status = Status::kError;
  result.reason = "goldens/flux is missing model.safetensors";
  result.replay = "./shardproof verify --case model/flux/ulysses/dp1.ring1.ulysses2/fp32/small";
  return result;
}

inline Verdict verdict_of(std::vector<CaseResult> cases) {
  Verdict verdict;
  verdict.commit = "abc1234def";
  verdict.command = "shardproof verify attention --quick";
  verdict.seed = 1;
  verdict.machine = {{"device", "cpu"}, {"cores", "2"}};
  verdict.started = "2025-06-01T12:00:00Z";
  verdict.seconds = 1.7;
  verdict.cases = std::move(cases);
  return verdict;
}

inline Verdict holding_verdict() {
  return verdict_of({passing_case("attention/joint/ulysses/dp1.ring1.ulysses2/bf16/plain"),
                     passing_case("attention/joint/ulysses/dp1.ring1.ulysses4/bf16/plain"),
                     passing_case("attention/joint/ring/dp1.ring2.ulysses1/fp32/plain")});
}

inline Verdict violated_verdict() {
  Verdict verdict = holding_verdict();
  verdict.cases.push_back(failing_case());
  verdict.cases.push_back(skipped_case());
  return verdict;
}

inline Verdict mixed_verdict() {
  Verdict verdict = violated_verdict();
  verdict.cases.push_back(erring_case());
  return verdict;
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

// Names that try to leave their place in a terminal, in XML and in a table.
inline const std::string kHostile =
    "a<b>&\"c\"'d'\x1b[31m\x01\x7f]]>\xff\xc0\xaf\xed\xa0\x80"
    "\xc2\x85\xe2\x80\xae\xef\xbf\xbf\r\n\t\xc3\xa9";

}  // namespace shardproof::verify
