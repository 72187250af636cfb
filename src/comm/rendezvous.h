// Who this process is in a world of processes, and where they meet. No LibTorch.
#pragma once
#include <string>

namespace shardproof::comm {

struct Rendezvous {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;  // among the processes of this host
  int local_size = 1;
  std::string host;  // where the store is: rank 0's
  int port = 29500;
  bool store_is_there = false;  // the launcher's own process serves it (torchrun)
  std::string source;           // "torchrun", "mpirun", "srun": for messages
};

// From what `shardproof launch`, torchrun (RANK, WORLD_SIZE, MASTER_ADDR, ...), OpenMPI's mpirun
// (OMPI_COMM_WORLD_...) or srun (SLURM_...) has set; MASTER_ADDR and MASTER_PORT win over what
// would be guessed. Errors (kBadInput): none of them; numbers that make no sense; several hosts
// without MASTER_ADDR.
Rendezvous rendezvous_from_environment();

// The GPU of this process: its local rank, or 0 if ranks share one (`launch --share-gpu` says so in
// SHARDPROOF_SHARE_GPU).
int local_device(const Rendezvous& rendezvous);

// The first host of a list in Slurm's notation: "node[03-07,11],login" -> "node03".
std::string first_slurm_host(const std::string& nodes);

}  // namespace shardproof::comm
