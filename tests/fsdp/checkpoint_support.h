// What tests of training checkpoints share: a small training state, its shards on a world of any
// size, and saves and loads of it. Ranks report by throwing: assertions are the main thread's.
#pragma once
#include <ATen/ATen.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "fsdp/checkpoint.h"
#include "tests/file_support.h"

namespace shardproof::tests {

struct WholeTensor {
  std::string name;
  at::Tensor values;
  bool replicated = false;  // on all ranks, written by rank 0
};

// Random bits, so that NaNs and subnormal numbers are among them.
std::vector<WholeTensor> training_state(uint64_t seed);

bool same_bits(const at::Tensor& a, const at::Tensor& b);

// The shards of rank `rank` of `ranks`; `filled`: with the state's rows, else with ones.
std::vector<fsdp::ShardedTensor> shards_of(const std::vector<WholeTensor>& state, int ranks,
                                           int rank, bool filled);
bool all_ones(const std::vector<fsdp::ShardedTensor>& shards);

fsdp::CheckpointInfo info_of(int ranks);
fsdp::RankState rank_state_of(int rank);

// What a case changes of a rank's part before it saves or loads.
using Edit = std::function<void(int rank, std::vector<fsdp::ShardedTensor>&)>;

void run_ranks(int ranks, const std::function<void(int, const comm::Communicator&)>& action);

void save_state(const std::filesystem::path& folder, const std::vector<WholeTensor>& state,
                int ranks);
// The error that every rank gets; that of another kind than kBadInput fails the test.
std::string save_error(const std::filesystem::path& folder, const std::vector<WholeTensor>& state,
                       int ranks, const Edit& edit = {}, ErrorKind kind = ErrorKind::kBadInput);
// And that no rank's tensors have changed.
std::string load_error(const std::filesystem::path& folder, const std::vector<WholeTensor>& state,
                       int ranks, const Edit& edit = {}, ErrorKind kind = ErrorKind::kBadInput);

// Loads on `ranks` ranks, compares every rank's rows with the state's bit for bit, and returns what
// each rank got besides.
std::vector<fsdp::LoadedCheckpoint> load_and_compare(const std::filesystem::path& folder,
                                                     const std::vector<WholeTensor>& state,
                                                     int ranks, const std::string& mesh = "");

}  // namespace shardproof::tests
