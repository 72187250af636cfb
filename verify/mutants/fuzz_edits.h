// Operators that edit what ranks compute with: plans, local gradients, losses. Nothing where the
// case has no such part.
#pragma once
#include "verify/mutants/fuzz_operators.h"

namespace shardproof::verify {

std::optional<Operation> draw_edit(const FuzzTarget& target, Draw& draw, double factor);
// Of these only those that scale: all ranks by `factor`, a single one by `on_one_rank`.
std::optional<Operation> draw_scaling_edit(const FuzzTarget& target, Draw& draw, double factor,
                                           double on_one_rank);

}  // namespace shardproof::verify
