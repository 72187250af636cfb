#include "verify/verdict/summary.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace shardproof::verify {
namespace {

bool judged(const TensorResult& tensor) {
  return tensor.status == Status::kPass || tensor.status == Status::kFail;
}

SummaryRow& row_of(Summary& summary, const CaseName& name) {
  auto same = [&](const SummaryRow& row) {
    return row.suite == name.suite && row.mode == name.mode && row.dtype == name.dtype;
  };
  auto found = std::find_if(summary.rows.begin(), summary.rows.end(), same);
  if (found != summary.rows.end()) return *found;
  summary.rows.push_back({.suite = name.suite, .mode = name.mode, .dtype = name.dtype});
  return summary.rows.back();
}

}  // namespace

CaseName split_case_id(const std::string& id) {
  CaseName name;
  std::size_t begin = 0;
  for (std::string* part : {&name.suite, &name.subject, &name.mode, &name.mesh, &name.dtype}) {
    const std::size_t end = id.find('/', begin);
    *part = id.substr(begin, end - begin);
    if (end == std::string::npos) return name;
    begin = end + 1;
  }
  name.variant = id.substr(begin);
  return name;
}

double limit_quotient(const TensorResult& tensor) {
  if (!std::isfinite(tensor.error)) return std::numeric_limits<double>::infinity();
  if (tensor.error == 0) return 0;
  const double quotient = tensor.error / tensor.limit;
  // A limit of zero gives infinity by itself; a limit that is NaN or negative allows nothing.
  return quotient >= 0 ? quotient : std::numeric_limits<double>::infinity();
}

const TensorResult* first_wrong_tensor(const CaseResult& result) {
  for (const TensorResult& tensor : result.tensors) {
    const bool named = result.first_wrong.empty() || tensor.name == result.first_wrong;
    if (tensor.status == Status::kFail && named) return &tensor;
  }
  return nullptr;
}

void Worst::take(const Worst& other) {
  if (other.tensor && (!tensor || other.quotient > quotient)) *this = other;
}

Summary summarize(const Verdict& verdict) {
  Summary summary;
  for (const CaseResult& result : verdict.cases) {
    SummaryRow& row = row_of(summary, split_case_id(result.id));
    ++row.cases;
    row.pass += result.status == Status::kPass;
    row.fail += result.status == Status::kFail;
    row.skip += result.status == Status::kSkip;
    row.error += result.status == Status::kError;
    if (result.status == Status::kSkip) ++summary.skip_reasons[result.reason];
    for (const TensorResult& tensor : result.tensors) {
      if (!judged(tensor)) continue;
      ++summary.tensors;
      row.worst.take({limit_quotient(tensor), &tensor, &result});
    }
    summary.worst.take(row.worst);
  }
  return summary;
}

}  // namespace shardproof::verify
