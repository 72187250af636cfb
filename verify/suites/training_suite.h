// Which training cases the suite runs.
#pragma once
#include <cstdint>
#include <vector>

#include "verify/suites/attention_suite.h"
#include "verify/training/training_case.h"

namespace shardproof::verify {

// A covering array: every pair of values of model, mesh (with its shards), dtype, accumulation,
// loss, gradient convention, optimizer, clipping, adapters, recomputation, dropout, guidance,
// placement of parameters, resharding, prefetching, gradients that end early, and how tokens are
// split, in some case. `quick`: every value once. fp64 cases of the whole suite take five steps,
// others two.
std::vector<TrainingCase> training_suite(const CaseFilter& filter, uint64_t seed, bool quick);

}  // namespace shardproof::verify
