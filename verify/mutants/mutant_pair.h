// Two mutants in one case.
#pragma once
#include <optional>

#include "verify/mutants/mutant.h"

namespace shardproof::verify {

// The subject with both planted, the edits of `a` before those of `b`. Nothing if they are of two
// kinds, or if both put something in the same place (a context, a merge).
std::optional<AnySubject> both(const AnySubject& a, const AnySubject& b);

}  // namespace shardproof::verify
