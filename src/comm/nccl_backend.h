// c10d's NCCL backend. Its code is a module of its own, because it links the CUDA libraries: a
// program without it starts in a third of the time.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>
#include <vector>

namespace shardproof::comm {

// Loads the module. Errors (kMissing): as below.
void require_nccl();

// Collective over the group. Errors (kMissing): the module was not built (no CUDA headers) or
// cannot be loaded.
c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int size,
                                                    std::chrono::milliseconds timeout,
                                                    at::Device device);

// One collective as the backend itself recorded it (c10d's flight recorder), apart from our own
// log.
struct FlightRecord {
  int64_t id = 0;     // grows with every record of the process
  std::string name;   // "all_to_all", "_all_gather_base", "send 0->1"
  int64_t input = 0;  // elements
  int64_t output = 0;
};
// Those with an id above `after`, in order; the recorder keeps the last 50,000 unless
// TORCH_FR_BUFFER_SIZE says otherwise. The module must be loaded.
std::vector<FlightRecord> nccl_flight_records(int64_t after);

// Collectives that have been issued and have not ended on the device, each by a name of its own:
// "ALLTOALL_BASE 12 of group 0".
std::vector<std::string> nccl_unfinished();

// What the module exports.
using MakeNcclBackend = c10::intrusive_ptr<c10d::Backend> (*)(
    const c10::intrusive_ptr<c10d::Store>&, int, int, std::chrono::milliseconds, at::Device);
using NcclTraceJson = std::string (*)();
using NcclUnfinished = std::vector<std::string> (*)();
inline constexpr const char* kMakeNcclBackend = "shardproof_make_nccl_backend";
inline constexpr const char* kNcclTraceJson = "shardproof_nccl_trace_json";
inline constexpr const char* kNcclUnfinished = "shardproof_nccl_unfinished";

}  // namespace shardproof::comm
