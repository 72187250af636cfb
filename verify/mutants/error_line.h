// Errors that are added to the numbers of a correct case.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "verify/mutants/stored_case.h"

namespace shardproof::verify {

// What is multiplied by 1 + e.
enum class Scope {
  kAllGradients,       // of attention
  kOneGradient,        // q:grad
  kHead,               // one head of the output
  kRows,               // one rank's rows of one stream of the output
  kLargest,            // the largest element of the output
  kElement,            // one of its elements that is not zero
  kModelGradients,     // of every parameter, in a model's forward and backward
  kTrainingGradients,  // of every parameter, in a training step
  kMatchedGradients    // the same, judged bit by bit (`verify training --matched`)
};
const std::vector<Scope>& all_scopes();
std::string scope_name(Scope scope);  // "one_head"
std::string scope_text(Scope scope);  // "one head of the output"

// The error in a case; nothing where it would change nothing (the true numbers are all zero).
std::optional<ErrorLine> error_line(const AttentionCase& c, const StoredCase& stored, Scope scope);
ErrorLine parameter_gradients(const StoredCase& stored);

}  // namespace shardproof::verify
