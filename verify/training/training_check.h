// Training under FSDP and sequence parallelism against training without: loss, gradients, norm,
// parameters and the optimizer's state after every step.
#pragma once
#include <vector>

#include "verify/training/training_run.h"

namespace shardproof::verify {

CaseResult check_training(const TrainingCase& c, const TrainingSubject& subject, Worlds& worlds);

std::vector<CasePtr> training_checks(const std::vector<TrainingCase>& cases,
                                     const TrainingSubject& subject = {});

}  // namespace shardproof::verify
