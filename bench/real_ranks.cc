#include "bench/real_ranks.h"

#include "comm/device.h"

namespace shardproof::bench {

std::unique_ptr<comm::ProcessWorld> join_world(const comm::Rendezvous& rendezvous,
                                               const std::string& transport,
                                               const std::string& fingerprint) {
  const bool nccl = transport == "nccl";
  comm::ProcessWorldOptions options;
  options.transport = nccl ? comm::Transport::kNccl : comm::Transport::kGloo;
  options.device = comm::compute_device(nccl ? "cuda" : "cpu", comm::local_device(rendezvous));
  options.fingerprint = fingerprint;
  return std::make_unique<comm::ProcessWorld>(rendezvous, options);
}

}  // namespace shardproof::bench
