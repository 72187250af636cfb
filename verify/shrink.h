// Makes a failing case small.
#pragma once
#include <functional>

#include "verify/attention/attention_case.h"

namespace shardproof::verify {

// Tries smaller and plainer cases as long as `fails` holds, at most `budget` calls. Returns the
// smallest failing case found (the given one if none is smaller).
AttentionCase shrink(const AttentionCase& failing,
                     const std::function<bool(const AttentionCase&)>& fails, int budget = 60);

}  // namespace shardproof::verify
