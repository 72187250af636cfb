// Training under FSDP and sequence parallelism against training without: loss, gradients, norm,
// parameters and the optimizer's state after every step.
//
// Against reference_training.h within the error budget, or against matched_training.h bit by bit.
#pragma once
#include <vector>

#include "verify/training/training_run.h"

namespace shardproof::verify {

enum class TrainingReference { kBudget, kMatched };

// kMatched: in simulated worlds only, other transports sum in other orders.
CaseResult check_training(const TrainingCase& c, const TrainingSubject& subject, Worlds& worlds,
                          TrainingReference reference = TrainingReference::kBudget);

std::vector<CasePtr> training_checks(const std::vector<TrainingCase>& cases,
                                     const TrainingSubject& subject = {},
                                     TrainingReference reference = TrainingReference::kBudget);

}  // namespace shardproof::verify
