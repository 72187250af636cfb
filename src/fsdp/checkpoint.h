// Sharded training checkpoints: each rank writes the rows that it holds, a manifest says what they
// are, and any other world can read them.
//
//   <folder>/manifest.json                  written last, by rank 0
//   <folder>/rank00000.safetensors, ...     the rows of one rank
//
// A folder is complete or not there: ranks write into <folder>.partial, which takes the folder's
// name when all is on the disk. A killed save never touches an older checkpoint.
#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "fsdp/shard_layout.h"

namespace shardproof::fsdp {

// One rank's rows of a tensor of the training state.
struct ShardedTensor {
  std::string name;            // "<parameter>:param", "<parameter>:exp_avg", ...
  std::vector<int64_t> shape;  // of the whole
  ShardLayout layout;
  int index = 0;  // which shard `rows` is
  // [layout.shard(index).size(), ...], of a scalar [1] or [0]; loading fills it in place.
  at::Tensor rows;
  // False on ranks that hold a copy of rows that another rank writes (replicas).
  bool writes = true;
};

struct CheckpointInfo {
  // Class and configuration: what must be the same to continue. An export writes it as config.json
  // if it is the JSON of a diffusers configuration.
  std::string model;
  std::string mesh;    // "dp2.ring1.ulysses4.fsdp8"
  std::string plan;    // gradient convention, dtypes: for people
  std::string commit;  // of the program that wrote it
  uint64_t seed = 0;
  int64_t step = 0;
  std::map<std::string, double> numbers;  // counters that continue ("optimizer_steps"), finite
};

// What belongs to a rank, not to rows: states of random generators (byte tensors on the CPU).
using RankState = std::map<std::string, at::Tensor>;

// Collective over `world`, which must be all ranks; `device` is one whose tensors it moves (CUDA
// for NCCL). Every rank lists the same tensors, in any order. The folder must be one that all hosts
// share; folders above it are created. Errors, on every rank, and nothing is left behind but those:
// kBadInput for a folder that is there already, one that cannot be written or that not all ranks
// see; lists that differ; a dtype that safetensors lacks; rows of a tensor that no rank writes, or
// two. kInternal for `rows` of another shape than the layout says.
void save_checkpoint(const std::filesystem::path& folder, const CheckpointInfo& info,
                     const std::vector<ShardedTensor>& tensors, const RankState& rank_state,
                     const comm::Communicator& world, at::Device device);

struct LoadedCheckpoint {
  CheckpointInfo info;
  // This rank's, where the checkpoint's world has the same mesh; empty elsewhere: generators start
  // from the seed and the step then.
  RankState rank_state;
};

// Fills `tensors` from a checkpoint of any world. `expected`: model and mesh of this run.
// Collective; `device` as above. Each rank opens the files that hold its rows, and no others.
// Errors, on every rank, with no tensor changed. kBadInput: no manifest (says whether a save was
// broken off), or not the same on all ranks; another model's; tensors that are missing, surplus or
// of another shape or dtype; a missing file, one whose checksum differs, or one without the rows
// (names the file). kInternal as above.
LoadedCheckpoint load_checkpoint(const std::filesystem::path& folder,
                                 const CheckpointInfo& expected,
                                 const std::vector<ShardedTensor>& tensors,
                                 const comm::Communicator& world, at::Device device);

// The complete checkpoint step-<n> with the largest n in `folder`; empty if there is none.
std::filesystem::path latest_checkpoint(const std::filesystem::path& folder);

}  // namespace shardproof::fsdp
