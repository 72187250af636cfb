// Which attention cases the suites run.
#pragma once
#include <cstdint>
#include <set>
#include <vector>

#include "verify/attention/attention_case.h"
#include "verify/golden.h"

namespace shardproof::verify {

// What the command line narrows a suite to; empty sets leave everything in.
struct CaseFilter {
  std::set<int> sp, ring, dp;
  std::set<c10::ScalarType> dtypes;
  int world = 0;  // only cases of this many ranks in all; 0: any
  std::string backend = "auto";
  // Sizes that are asked for: suites add them to their own.
  std::set<int> wanted_sp() const;
  bool admits(const AttentionCase& c) const;
};

// The default suite: every mode at sp 1..8 (and at larger sp that the filter names) in every dtype,
// with masks, uneven and padded cuts, grouped KV heads, replicated text and strided inputs spread
// over them. `quick` takes a part of it that still holds every mode, dtype and mask.
std::vector<AttentionCase> attention_suite(const CaseFilter& filter, uint64_t seed, bool quick);

// `count` random cases, dealt evenly over the cells (mode x dtype x masked x uneven x grouped).
std::vector<AttentionCase> random_attention_cases(const CaseFilter& filter, uint64_t seed,
                                                  int64_t count);

// A golden on every mesh that its heads allow: all factorisations of the wanted sp (default 2, 4).
std::vector<AttentionCase> golden_cases(const AttentionGolden& golden, const CaseFilter& filter,
                                        bool quick);

}  // namespace shardproof::verify
