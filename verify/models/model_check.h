// Runs model cases and judges them.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "verify/case.h"
#include "verify/models/model_run.h"

namespace shardproof::verify {

// Draws the data (or takes `golden`'s) and judges, as Case::check() does. The oracle is the same
// model in fp64 on one rank, or the golden's values, which diffusers computed, in fp64 and fp32.
CaseResult check_model(const ModelCase& c, const ModelSubject& subject, Worlds& worlds,
                       const ModelGolden* golden = nullptr);

// Cases for the runner. `goldens` by name; they must outlive the cases. Errors (kBadInput): a case
// that names a golden which is not among them.
std::vector<CasePtr> model_checks(const std::vector<ModelCase>& cases,
                                  const std::map<std::string, ModelGolden>& goldens = {},
                                  const ModelSubject& subject = {});

}  // namespace shardproof::verify
