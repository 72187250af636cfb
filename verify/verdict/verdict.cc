#include "verify/verdict/verdict.h"

#include <cmath>

#include "base/error.h"

namespace shardproof::verify {

const char* to_string(Status status) {
  switch (status) {
    case Status::kPass:
      return "pass";
    case Status::kFail:
      return "fail";
    case Status::kSkip:
      return "skip";
    case Status::kError:
      return "error";
  }
  internal_error("a status with the number {}; expected 0 to 3", static_cast<int>(status));
}

void CaseResult::conclude() {
  bool any_fail = false, any_error = false, any_pass = false;
  auto take = [&](Status part) {
    any_fail |= part == Status::kFail;
    any_error |= part == Status::kError;
    any_pass |= part == Status::kPass;
  };
  first_wrong.clear();
  for (TensorResult& tensor : tensors) {
    if (tensor.status == Status::kPass && std::isnan(tensor.error)) tensor.status = Status::kFail;
    take(tensor.status);
    if (tensor.status == Status::kFail && first_wrong.empty()) first_wrong = tensor.name;
  }
  for (const CheckResult& check : checks) take(check.status);

  if (status == Status::kSkip || status == Status::kError) return;
  if (any_error) {
    status = Status::kError;
    if (reason.empty()) reason = "a tensor or a check could not be judged";
  } else if (any_fail) {
    status = Status::kFail;
  } else if (any_pass) {
    status = Status::kPass;
  } else if (tensors.empty() && checks.empty()) {
    status = Status::kError;
    reason = "nothing was compared: the case has no tensor and no check";
  } else {
    status = Status::kSkip;
    if (reason.empty()) reason = "every tensor and check of the case was skipped";
  }
}

Verdict::Counts Verdict::counts() const {
  Counts counts;
  for (const CaseResult& result : cases) {
    switch (result.status) {
      case Status::kPass:
        ++counts.pass;
        break;
      case Status::kFail:
        ++counts.fail;
        break;
      case Status::kSkip:
        ++counts.skip;
        break;
      case Status::kError:
        ++counts.error;
        break;
    }
  }
  return counts;
}

Status Verdict::status() const {
  const Counts n = counts();
  if (n.error > 0 || n.pass + n.fail == 0) return Status::kError;
  return n.fail > 0 ? Status::kFail : Status::kPass;
}

}  // namespace shardproof::verify
