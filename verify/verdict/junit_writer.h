// Writes a verdict as JUnit XML, the dialect that Jenkins, GitLab and GitHub actions read: a
// testsuite per suite of the verdict, a testcase per case.
//
// A failing case has <failure> whose message is its first wrong tensor (or failing check) in one
// sentence and whose text is the evidence with the replay command; error and skip have <error> and
// <skipped>. Names are escaped; bytes that XML 1.0 cannot carry are written out as \xNN.
#pragma once
#include <string>

#include "verify/verdict/verdict.h"

namespace shardproof::verify {

std::string to_junit(const Verdict& verdict);

}  // namespace shardproof::verify
