// What the readable writers share: counts by suite, mode and dtype, and how near to its limit each
// error came. Pointers refer into the verdict and live as long as it.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "verify/verdict/verdict.h"

namespace shardproof::verify {

// The parts of a case id, `<suite>/<subject>/<mode>/<mesh>/<dtype>/<variant>[#seed]`. Parts that an
// id lacks are empty; a seventh part and later ones stay in the variant.
struct CaseName {
  std::string suite, subject, mode, mesh, dtype, variant;
};
CaseName split_case_id(const std::string& id);

// error / limit: above 1 fails. Infinite where the error is not finite, or not zero under a limit
// of zero; 0 where both are zero.
double limit_quotient(const TensorResult& tensor);

// The first failing tensor in program order (the one that `first_wrong` names, where it does), or
// null.
const TensorResult* first_wrong_tensor(const CaseResult& result);

// The judged (passed or failed) tensor with the largest quotient; null where there is none.
struct Worst {
  double quotient = 0;
  const TensorResult* tensor = nullptr;
  const CaseResult* in_case = nullptr;

  void take(const Worst& other);
};

struct SummaryRow {
  std::string suite, mode, dtype;
  int cases = 0, pass = 0, fail = 0, skip = 0, error = 0;
  Worst worst = {};
};

struct Summary {
  std::vector<SummaryRow> rows;  // in the order in which the cases name them
  int64_t tensors = 0;           // judged
  Worst worst;
  std::map<std::string, int> skip_reasons;
};
Summary summarize(const Verdict& verdict);

}  // namespace shardproof::verify
