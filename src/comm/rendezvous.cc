#include "comm/rendezvous.h"

#include <charconv>
#include <cstdlib>
#include <cstring>

#include "base/error.h"

namespace shardproof::comm {
namespace {

const char* variable(const char* name) {
  const char* value = std::getenv(name);
  return value && *value ? value : nullptr;
}

int number(const char* name, int lowest, int highest) {
  const char* text = variable(name);
  if (!text)
    bad_input("{} is not set; start the ranks by shardproof launch, torchrun, mpirun or srun",
              name);
  int value = 0;
  const auto [end, error] = std::from_chars(text, text + std::strlen(text), value);
  if (error != std::errc() || *end != 0 || value < lowest || value > highest) {
    bad_input("{}='{}': expected a number from {} to {}", name, text, lowest, highest);
  }
  return value;
}

int number_or(const char* name, int lowest, int highest, int otherwise) {
  return variable(name) ? number(name, lowest, highest) : otherwise;
}

constexpr int kMostRanks = 1 << 16;

Rendezvous from(const char* source, const char* rank, const char* size, const char* local_rank,
                const char* local_size) {
  Rendezvous r;
  r.source = source;
  r.world_size = number(size, 1, kMostRanks);
  r.rank = number(rank, 0, r.world_size - 1);
  r.local_size = number_or(local_size, 1, r.world_size, r.world_size);
  r.local_rank = number_or(local_rank, 0, kMostRanks, r.rank % r.local_size);
  return r;
}

void choose_host(Rendezvous& r) {
  if (const char* host = variable("MASTER_ADDR")) {
    r.host = host;
  } else if (const char* nodes = variable("SLURM_STEP_NODELIST"); nodes && r.source == "srun") {
    r.host = first_slurm_host(nodes);
  } else if (r.local_size == r.world_size) {
    r.host = "127.0.0.1";
  } else {
    bad_input("{} ranks on several hosts: set MASTER_ADDR to the host of rank 0", r.world_size);
  }
  r.port = number_or("MASTER_PORT", 1, 65535, 29500);
}

}  // namespace

int local_device(const Rendezvous& rendezvous) {
  return std::getenv("SHARDPROOF_SHARE_GPU") ? 0 : rendezvous.local_rank;
}

std::string first_slurm_host(const std::string& nodes) {
  const size_t open = nodes.find_first_of("[,");
  if (open == std::string::npos || nodes[open] == ',') return nodes.substr(0, open);
  const size_t end = nodes.find_first_of(",-]", open);
  if (end == std::string::npos) bad_input("'{}' is no list of hosts as Slurm writes it", nodes);
  return nodes.substr(0, open) + nodes.substr(open + 1, end - open - 1);
}

Rendezvous rendezvous_from_environment() {
  Rendezvous r;
  if (variable("RANK")) {
    r = from("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE");
    const char* agent = variable("TORCHELASTIC_USE_AGENT_STORE");
    r.store_is_there = agent && std::strcmp(agent, "True") == 0;
  } else if (variable("OMPI_COMM_WORLD_RANK")) {
    r = from("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
             "OMPI_COMM_WORLD_LOCAL_SIZE");
  } else if (variable("SLURM_PROCID")) {
    r = from("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE");
  } else {
    bad_input(
        "no world of processes: neither RANK (shardproof launch, torchrun) nor "
        "OMPI_COMM_WORLD_RANK (mpirun) nor SLURM_PROCID (srun) is set; try ./shardproof launch -n "
        "2 "
        "-- verify --transport gloo");
  }
  choose_host(r);
  return r;
}

}  // namespace shardproof::comm
