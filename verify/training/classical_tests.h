// The three tests of sequence parallelism that users of verl-omni know, by their names: world 4,
// sp 2 and 4, parameters in bf16, reduction in fp32. Each with our verdict tensor by tensor and,
// beside it, what their single number (the norm of all gradients within 1e-2) says of it.
//
//   training/ulysses_forward/ulysses/dp2.ring1.ulysses2/bf16/classical#7
#pragma once
#include <string>
#include <vector>

#include "verify/case.h"
#include "verify/suites/attention_suite.h"

namespace shardproof::verify {

std::vector<CasePtr> classical_tests(const CaseFilter& filter, uint64_t seed);

// Whether `id` is one of them, or the name of a test: then all of its meshes.
bool is_classical_test(const std::string& id);
// Errors (kBadInput): no such test or mesh.
std::vector<CasePtr> find_classical_tests(const std::string& id,
                                          const std::string& backend = "auto");

}  // namespace shardproof::verify
