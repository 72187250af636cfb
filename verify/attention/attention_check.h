// Runs one attention case and judges it.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "verify/attention/attention_run.h"
#include "verify/case.h"

namespace shardproof::verify {

// Draws the data (or takes `golden`'s) and judges, as Case::check() does.
CaseResult check_attention(const AttentionCase& c, const AttentionSubject& subject, Worlds& worlds,
                           const AttentionGolden* golden = nullptr);

// Cases for the runner. `goldens` by name, for cases that name one; they must outlive the cases.
// Errors (kBadInput): a golden that is not among them.
std::vector<CasePtr> attention_checks(const std::vector<AttentionCase>& cases,
                                      const std::map<std::string, AttentionGolden>& goldens = {},
                                      const AttentionSubject& subject = {});

}  // namespace shardproof::verify
