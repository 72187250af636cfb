// Which model cases the suites run.
#pragma once
#include <cstdint>
#include <vector>

#include "verify/models/model_case.h"
#include "verify/models/model_golden.h"
#include "verify/suites/attention_suite.h"

namespace shardproof::verify {

// Every model on every mesh of the suite (Ulysses 2, 3, 4, 8, ring 2, 3, 4, hybrid 2x2 and 2x4, and
// gathered K, V; and on all meshes of other sp that the filter names), in fp64 with every variant,
// in the other dtypes with a part of them. `quick` takes a part that still holds every model, mode,
// dtype and variant.
std::vector<ModelCase> model_suite(const CaseFilter& filter, uint64_t seed, bool quick);

// `count` random cases, dealt evenly over models, modes and dtypes.
std::vector<ModelCase> random_model_cases(const CaseFilter& filter, uint64_t seed, int64_t count);

// A golden without SP and on the meshes of sp = 2 and 4 (or those that the filter names), in fp64
// and fp32.
std::vector<ModelCase> golden_model_cases(const ModelGolden& golden, const CaseFilter& filter,
                                          bool quick);

}  // namespace shardproof::verify
