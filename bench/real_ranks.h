// What benchmarks on real ranks begin with.
#pragma once
#include <memory>
#include <string>

#include "comm/process_world.h"

namespace shardproof::bench {

// This process as a rank of the world around it, over "nccl" on its GPU or "gloo" on the CPU.
// Errors: see comm::rendezvous_from_environment and comm::ProcessWorld.
std::unique_ptr<comm::ProcessWorld> join_world(const comm::Rendezvous& rendezvous,
                                               const std::string& transport,
                                               const std::string& fingerprint);

}  // namespace shardproof::bench
