#include "fsdp/checkpoint.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <utility>

#include "base/atomic_file.h"
#include "base/error.h"
#include "base/json_file.h"
#include "comm/tag.h"
#include "fsdp/agreement.h"
#include "fsdp/checkpoint_files.h"
#include "fsdp/checkpoint_manifest.h"
#include "fsdp/staging_folder.h"
#include "io/safetensors.h"

namespace shardproof::fsdp {
namespace {

namespace fs = std::filesystem;
using TensorsByName = std::map<std::string, const ShardedTensor*>;

constexpr const char* kRankStatePrefix = "rng/";

plan::Interval own_rows(const ShardedTensor& tensor) { return tensor.layout.shard(tensor.index); }

TensorsByName by_name(const std::vector<ShardedTensor>& tensors) {
  TensorsByName all;
  for (const ShardedTensor& tensor : tensors) {
    const std::string name = json_quoted(tensor.name);
    SP_CHECK(all.emplace(tensor.name, &tensor).second, "tensor {} is listed twice", name);
    SP_CHECK(!tensor.name.starts_with(kRankStatePrefix), "tensor {} has a rank state's name", name);
    SP_CHECK(tensor.rows.defined(), "tensor {}", name);
    SP_CHECK(tensor.layout.rows == rows_of(tensor.shape) && tensor.index >= 0 &&
                 tensor.index < tensor.layout.shards,
             "tensor {} of shape [{}]: shard {} of {}, {} rows", name, fmt::join(tensor.shape, ","),
             tensor.index, tensor.layout.shards, tensor.layout.rows);
    const std::vector<int64_t> expected = with_rows(tensor.shape, own_rows(tensor).size());
    SP_CHECK(tensor.rows.sizes() == expected, "tensor {}: rows of shape [{}], expected [{}]", name,
             fmt::join(tensor.rows.sizes(), ","), fmt::join(expected, ","));
  }
  return all;
}

// ---------------------------------------------------------------- save

// What all ranks must agree on, a line a tensor.
std::string describe(const TensorsByName& tensors) {
  std::string text;
  for (const auto& [name, tensor] : tensors) {
    text +=
        fmt::format("{} {} [{}]\n", json_quoted(name, name.size()),
                    safetensors_dtype(tensor->rows.scalar_type()), fmt::join(tensor->shape, ","));
  }
  return text;
}

// `lists` by rank, or nothing where they are all the same.
void require_same_lists(const std::vector<std::string>& lists) {
  for (size_t rank = 1; rank < lists.size(); ++rank) {
    const auto [a, b] =
        std::mismatch(lists[0].begin(), lists[0].end(), lists[rank].begin(), lists[rank].end());
    if (a == lists[0].end() && b == lists[rank].end()) continue;
    const auto line_at = [](const std::string& list, std::string::const_iterator at) {
      const auto begin = std::find(std::make_reverse_iterator(at), list.rend(), '\n').base();
      const std::string line(begin, std::find(at, list.end(), '\n'));
      return line.empty() ? "no further tensor" : line;
    };
    bad_input("ranks list different tensors: rank 0 {}, rank {} {}", line_at(lists[0], a), rank,
              line_at(lists[rank], b));
  }
}

FileRecord write_rank_file(const fs::path& folder, int rank, const TensorsByName& tensors,
                           const RankState& rank_state) {
  std::error_code ignored;
  if (!fs::is_directory(folder, ignored)) {
    bad_input("{}, which rank 0 has made, is not there; save into a folder that all hosts share",
              folder.string());
  }
  std::map<std::string, at::Tensor> content;
  for (const auto& [name, tensor] : tensors) {
    if (tensor->writes && own_rows(*tensor).size() > 0) content[name] = tensor->rows;
  }
  for (const auto& [key, state] : rank_state) content[kRankStatePrefix + key] = state;
  const fs::path file = folder / rank_file_name(rank);
  save_safetensors(file, content);
  return record_of(SafetensorsFile::open(file));
}

// What a rank tells of its file: size, checksum and, for each tensor, the rows in it.
std::vector<int64_t> to_numbers(const FileRecord& file, const TensorsByName& tensors) {
  std::vector<int64_t> numbers = {static_cast<int64_t>(file.bytes),
                                  static_cast<int64_t>(file.checksum)};
  for (const auto& [name, tensor] : tensors) {
    const plan::Interval rows = tensor->writes ? own_rows(*tensor) : plan::Interval();
    numbers.insert(numbers.end(), {rows.begin, rows.end});
  }
  return numbers;
}

Manifest make_manifest(const CheckpointInfo& info, const TensorsByName& tensors,
                       const std::vector<std::vector<int64_t>>& reports) {
  Manifest manifest{info, {}, {}};
  for (const auto& report : reports) {
    manifest.files.push_back({static_cast<uint64_t>(report[0]), static_cast<uint64_t>(report[1])});
  }
  size_t at = 2;
  for (const auto& [name, tensor] : tensors) {
    TensorRecord& record = manifest.tensors[name];
    record.dtype = safetensors_dtype(tensor->rows.scalar_type());
    record.shape = tensor->shape;
    for (size_t rank = 0; rank < reports.size(); ++rank) {
      const plan::Interval rows{reports[rank][at], reports[rank][at + 1]};
      if (rows.size() > 0) record.parts.push_back({static_cast<int>(rank), rows});
    }
    at += 2;
  }
  require_each_row_once(manifest);
  return manifest;
}

std::optional<Error> save_into(StagingFolder& staging, const CheckpointInfo& info,
                               const std::vector<ShardedTensor>& tensors,
                               const RankState& rank_state, int rank, const Agreement& ranks) {
  TensorsByName named;
  std::string list;
  std::optional<Error> failure = ranks.attempt([&] {
    named = by_name(tensors);
    list = describe(named);
    staging.create();
  });
  if (failure) return failure;
  const std::vector<std::string> lists = ranks.gather_if_different(list);
  FileRecord file;
  failure = ranks.attempt([&] {
    require_same_lists(lists);
    file = write_rank_file(staging.path(), rank, named, rank_state);
  });
  if (failure) return failure;
  const auto reports = ranks.gather(to_numbers(file, named));
  failure = ranks.attempt([&] {
    const std::string text = manifest_text(make_manifest(info, named, reports));
    if (rank == 0) write_file_atomically(staging.path() / kManifestName, text);
  });
  if (failure) return failure;
  return ranks.attempt([&] { staging.publish(); });
}

// ---------------------------------------------------------------- load

struct RowCopy {
  at::Tensor to, from;  // `from` lies in a mapped file whose checksum has been compared
};

void require_same_run(const Manifest& manifest, const CheckpointInfo& expected,
                      const TensorsByName& tensors, const fs::path& folder) {
  if (manifest.info.model != expected.model) {
    bad_input("{} is of another model: expected {}, found {}", folder.string(),
              json_quoted(expected.model), json_quoted(manifest.info.model));
  }
  std::vector<std::string> problems;
  for (const auto& [name, tensor] : tensors) {
    const auto found = manifest.tensors.find(name);
    if (found == manifest.tensors.end()) {
      problems.push_back(fmt::format("tensor {} is missing", json_quoted(name)));
      continue;
    }
    const std::string wanted =
        type_text(safetensors_dtype(tensor->rows.scalar_type()), tensor->shape);
    const std::string there = type_text(found->second.dtype, found->second.shape);
    if (wanted == there) continue;
    problems.push_back(
        fmt::format("tensor {}: expected {}, found {}", json_quoted(name), wanted, there));
  }
  for (const auto& [name, record] : manifest.tensors) {
    if (tensors.contains(name)) continue;
    problems.push_back(fmt::format("tensor {} is not of this run", json_quoted(name)));
  }
  if (problems.empty()) return;
  constexpr size_t kShown = 20;
  const size_t count = problems.size();
  problems.resize(std::min(count, kShown));
  bad_input("{} is of another run, {} problem{}:\n  - {}{}", folder.string(), count,
            count == 1 ? "" : "s", fmt::join(problems, "\n  - "),
            count > kShown ? "\n  and more" : "");
}

// Adds the copies that fill this rank's rows from the files that hold a part of them.
void plan_copies(const ShardedTensor& tensor, const TensorRecord& record, CheckpointFiles& files,
                 std::vector<RowCopy>& copies) {
  const plan::Interval mine = own_rows(tensor);
  for (const StoredRows& part : record.parts) {
    const plan::Interval both{std::max(mine.begin, part.rows.begin),
                              std::min(mine.end, part.rows.end)};
    if (both.size() <= 0) continue;
    const at::Tensor stored = files.rows(tensor.name, record, part);
    copies.push_back({tensor.rows.narrow(0, both.begin - mine.begin, both.size()),
                      stored.narrow(0, both.begin - part.rows.begin, both.size())});
  }
}

RankState read_rank_state(const SafetensorsFile& file) {
  RankState states;
  const std::string prefix = kRankStatePrefix;
  for (const SafetensorsEntry& entry : file.entries()) {
    if (!entry.name.starts_with(prefix)) continue;
    states[entry.name.substr(prefix.size())] = file.tensor(entry.name).clone();
  }
  return states;
}

struct LoadPlan {
  Manifest manifest;
  std::vector<RowCopy> copies;
  RankState rank_state;
};

LoadPlan plan_load(const fs::path& folder, const CheckpointInfo& expected,
                   const std::vector<ShardedTensor>& tensors, const comm::Communicator& world) {
  const at::NoGradGuard no_grad;  // rows may be parameters
  const TensorsByName named = by_name(tensors);
  LoadPlan plan{read_manifest(folder), {}, {}};
  require_same_run(plan.manifest, expected, named, folder);
  CheckpointFiles files(folder, plan.manifest.files);
  for (const auto& [name, tensor] : named) {
    plan_copies(*tensor, plan.manifest.tensors.at(name), files, plan.copies);
  }
  const bool same_ranks = plan.manifest.info.mesh == expected.mesh &&
                          plan.manifest.files.size() == static_cast<size_t>(world.size());
  if (same_ranks) plan.rank_state = read_rank_state(files.open(world.rank()));
  return plan;
}

}  // namespace

void save_checkpoint(const fs::path& folder, const CheckpointInfo& info,
                     const std::vector<ShardedTensor>& tensors, const RankState& rank_state,
                     const comm::Communicator& world, at::Device device) {
  const comm::CollectiveScope scope("save_checkpoint");
  const Agreement ranks(world, device);
  StagingFolder staging(folder, world.rank() == 0);
  const std::optional<Error> failure =
      save_into(staging, info, tensors, rank_state, world.rank(), ranks);
  if (!failure) return;
  staging.remove();
  world.barrier();  // a rank that goes on finds nothing left
  throw *failure;
}

LoadedCheckpoint load_checkpoint(const fs::path& folder, const CheckpointInfo& expected,
                                 const std::vector<ShardedTensor>& tensors,
                                 const comm::Communicator& world, at::Device device) {
  const comm::CollectiveScope scope("load_checkpoint");
  const Agreement ranks(world, device);
  LoadPlan plan;
  std::optional<Error> failure =
      ranks.attempt([&] { plan = plan_load(folder, expected, tensors, world); });
  if (failure) throw *failure;
  if (!ranks.gather_if_different(manifest_text(plan.manifest)).empty()) {
    bad_input("{} is not the same on all hosts: its manifests differ", folder.string());
  }
  const at::NoGradGuard no_grad;
  for (const RowCopy& copy : plan.copies) copy.to.copy_(copy.from);
  return {plan.manifest.info, std::move(plan.rank_state)};
}

fs::path latest_checkpoint(const fs::path& folder) {
  constexpr std::string_view kPrefix = "step-";
  std::pair<int64_t, fs::path> latest = {-1, {}};
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (!name.starts_with(kPrefix)) continue;
    int64_t step = -1;
    const char* stop = name.data() + name.size();
    const auto [read, problem] = std::from_chars(name.data() + kPrefix.size(), stop, step);
    std::error_code ignored;
    const bool is_complete = read == stop && problem == std::errc() && step >= 0 &&
                             fs::is_regular_file(it->path() / kManifestName, ignored);
    if (is_complete) latest = std::max(latest, {step, it->path()});
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    bad_input("cannot look for checkpoints in {}: {}", folder.string(), error.message());
  }
  return latest.second;
}

}  // namespace shardproof::fsdp
