// The collectives that an attention case must issue, counted from the case alone.
#pragma once
#include "verify/attention/ownership.h"
#include "verify/rank_world.h"
#include "verify/verdict/verdict.h"

namespace shardproof::verify {

// Compares kinds, counts and elements of every rank's calls in the last run of `world`.
CheckResult check_trace(const AttentionCase& c, const Ownership& ownership, const RankWorld& world);

}  // namespace shardproof::verify
