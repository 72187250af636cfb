// Do ranks draw the random numbers that they must have in common, and others where they must
// differ?
#pragma once
#include <cstdint>
#include <vector>

#include "comm/mesh_shape.h"
#include "verify/verdict/verdict.h"

namespace shardproof::verify {

// `fingerprints`: comm::RandomStreams::replica_fingerprint() of every world rank after the run. All
// SP ranks of a replica must agree (same stream, as many draws); replicas must differ.
CheckResult check_rng(const comm::MeshShape& mesh, const std::vector<uint64_t>& fingerprints);

}  // namespace shardproof::verify
