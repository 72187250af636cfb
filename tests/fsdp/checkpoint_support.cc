#include "tests/fsdp/checkpoint_support.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <cstring>

#include "comm/mesh.h"
#include "sim/world.h"
#include "tests/fsdp/shard_support.h"
#include "tests/sim/engine/violation.h"

namespace shardproof::tests {

using fsdp::CheckpointInfo;
using fsdp::LoadedCheckpoint;
using fsdp::RankState;
using fsdp::ShardedTensor;

std::vector<WholeTensor> training_state(uint64_t seed) {
  at::Generator generator = at::detail::createCPUGenerator(seed);
  const auto bits = [&](std::vector<int64_t> shape, at::ScalarType type) {
    at::Tensor values = at::empty(shape, type);
    values.view({-1}).view(at::kByte).random_(0, 256, generator);
    return values;
  };
  // Of 10 rows four ranks hold 3, 3, 3 and 1; of 3 rows the last holds none.
  return {{"block.0.weight:param", bits({10, 4}, at::kBFloat16)},
          {"block.0.weight:exp_avg", bits({10, 4}, at::kFloat)},
          {"block.0.bias:param", bits({3}, at::kDouble)},
          {"block.1.weight:param", bits({3, 2, 5}, at::kDouble)},
          {"ids", bits({10, 2}, at::kLong)},
          {"no rows", bits({1}, at::kFloat).expand({0, 3}).contiguous()},
          {"scale", at::scalar_tensor(0.1, at::kFloat)},
          {"replicated", bits({5, 3}, at::kFloat), true}};
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  const at::Tensor here = a.cpu(), there = b.cpu();
  return a.numel() == 0 ||
         std::memcmp(here.const_data_ptr(), there.const_data_ptr(), a.nbytes()) == 0;
}

std::vector<ShardedTensor> shards_of(const std::vector<WholeTensor>& state, int ranks, int rank,
                                     bool filled) {
  std::vector<ShardedTensor> shards;
  for (const WholeTensor& whole : state) {
    ShardedTensor shard;
    shard.name = whole.name;
    shard.shape = whole.values.sizes().vec();
    const at::Tensor all = whole.values.dim() == 0 ? whole.values.view({1}) : whole.values;
    shard.layout = {all.size(0), whole.replicated ? 1 : ranks};
    shard.index = whole.replicated ? 0 : rank;
    shard.writes = !whole.replicated || rank == 0;
    const plan::Interval rows = shard.layout.shard(shard.index);
    shard.rows = all.narrow(0, rows.begin, rows.size()).clone().to(device());
    if (!filled) shard.rows.fill_(1);
    shards.push_back(shard);
  }
  return shards;
}

bool all_ones(const std::vector<ShardedTensor>& shards) {
  return std::all_of(shards.begin(), shards.end(), [](const ShardedTensor& shard) {
    return at::equal(shard.rows, at::ones_like(shard.rows));
  });
}

CheckpointInfo info_of(int ranks) {
  CheckpointInfo info;
  info.model = "QwenImage {\"layers\": 2}";
  info.mesh = fmt::format("dp{}", ranks);
  info.plan = "convention C";
  info.commit = "0123abc";
  info.seed = 7;
  info.step = 100;
  info.numbers = {{"optimizer_steps", 25}, {"samples", 0.1}};
  return info;
}

RankState rank_state_of(int rank) {
  return {{"noise", at::full({9}, rank, at::kByte)}, {"time", at::full({3}, 50 + rank, at::kByte)}};
}

void run_ranks(int ranks, const std::function<void(int, const comm::Communicator&)>& action) {
  sim::World world(ranks, on_device());
  world.run([&](sim::RankContext& rank) {
    const comm::Mesh mesh(rank, {.dp = ranks});
    action(rank.rank(), mesh.dp());
  });
}

namespace {

// The text that `action` throws on every rank, which must be the same on all.
std::string error_of_all(int ranks, ErrorKind kind,
                         const std::function<void(int, const comm::Communicator&)>& action) {
  std::vector<std::string> texts(static_cast<size_t>(ranks));
  run_ranks(ranks, [&](int rank, const comm::Communicator& all) {
    try {
      action(rank, all);
    } catch (const sim::CollectiveError&) {
      throw;
    } catch (const Error& error) {
      expect(error.kind() == kind, error.what());
      texts[static_cast<size_t>(rank)] = error.what();
    }
  });
  for (const std::string& text : texts) {
    CHECK_FALSE(text.empty());
    CHECK(text == texts[0]);
  }
  return texts[0];
}

}  // namespace

void save_state(const std::filesystem::path& folder, const std::vector<WholeTensor>& state,
                int ranks) {
  run_ranks(ranks, [&](int rank, const comm::Communicator& all) {
    save_checkpoint(folder, info_of(ranks), shards_of(state, ranks, rank, true),
                    rank_state_of(rank), all, device());
  });
}

std::string save_error(const std::filesystem::path& folder, const std::vector<WholeTensor>& state,
                       int ranks, const Edit& edit, ErrorKind kind) {
  return error_of_all(ranks, kind, [&](int rank, const comm::Communicator& all) {
    std::vector<ShardedTensor> shards = shards_of(state, ranks, rank, true);
    if (edit) edit(rank, shards);
    save_checkpoint(folder, info_of(ranks), shards, rank_state_of(rank), all, device());
  });
}

std::string load_error(const std::filesystem::path& folder, const std::vector<WholeTensor>& state,
                       int ranks, const Edit& edit, ErrorKind kind) {
  return error_of_all(ranks, kind, [&](int rank, const comm::Communicator& all) {
    std::vector<ShardedTensor> shards = shards_of(state, ranks, rank, false);
    if (edit) edit(rank, shards);
    try {
      load_checkpoint(folder, info_of(ranks), shards, all, device());
    } catch (const Error&) {
      if (!all_ones(shards)) throw std::runtime_error("a failed load has changed a tensor");
      throw;
    }
  });
}

std::vector<LoadedCheckpoint> load_and_compare(const std::filesystem::path& folder,
                                               const std::vector<WholeTensor>& state, int ranks,
                                               const std::string& mesh) {
  std::vector<LoadedCheckpoint> loaded(static_cast<size_t>(ranks));
  run_ranks(ranks, [&](int rank, const comm::Communicator& all) {
    CheckpointInfo expected = info_of(ranks);
    if (!mesh.empty()) expected.mesh = mesh;
    const std::vector<ShardedTensor> got = shards_of(state, ranks, rank, false);
    loaded[static_cast<size_t>(rank)] = load_checkpoint(folder, expected, got, all, device());
    const std::vector<ShardedTensor> want = shards_of(state, ranks, rank, true);
    for (size_t i = 0; i < want.size(); ++i) {
      expect(same_bits(got[i].rows, want[i].rows),
             fmt::format("rank {} of {}: tensor {}", rank, ranks, want[i].name));
    }
  });
  return loaded;
}

}  // namespace shardproof::tests
