// Faults planted in sequence-parallel attention, each a plan edit, a fault plan or a replaced
// operation. They show that the checks can fail; src/ knows nothing of them.
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "verify/attention/attention_run.h"

namespace shardproof::verify {

struct AttentionMutant {
  std::string id;
  std::string text;                   // the bug in a sentence
  std::vector<std::string> expected;  // tensors of which the first wrong one must be one
  // The subject with the fault; nothing where the fault cannot be expressed in the case (no ring,
  // no mask, ...), in which the mutant equals the product.
  std::function<std::optional<AttentionSubject>(const AttentionCase&)> plant;
};

const std::vector<AttentionMutant>& attention_mutants();

}  // namespace shardproof::verify
