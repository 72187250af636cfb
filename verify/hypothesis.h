// What the numbers of a failed case suggest as the cause. Explains, never decides.
#pragma once
#include <vector>

#include "comm/mesh_shape.h"
#include "verify/verdict/verdict.h"

namespace shardproof::verify {

// Best guess first; empty if nothing fits.
std::vector<Hypothesis> suggest(const CaseResult& result, const comm::MeshShape& mesh);

}  // namespace shardproof::verify
