// manifest.json of a training checkpoint: which rows of which tensor lie in which file. What it
// says can be judged before another file is opened.
#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "fsdp/checkpoint.h"
#include "plan/attention_plan.h"

namespace shardproof::fsdp {

inline constexpr const char* kManifestName = "manifest.json";

struct FileRecord {
  uint64_t bytes = 0;
  uint64_t checksum = 0;  // base/checksum.h, of the whole file
};

struct StoredRows {
  int file = 0;  // rank that wrote them
  plan::Interval rows;
};

struct TensorRecord {
  std::string dtype;           // "F32", as safetensors spells it
  std::vector<int64_t> shape;  // of the whole
  std::vector<StoredRows> parts;

  int64_t rows() const { return rows_of(shape); }
};

struct Manifest {
  CheckpointInfo info;
  std::vector<FileRecord> files;  // one a rank
  std::map<std::string, TensorRecord> tensors;
};

std::string rank_file_name(int rank);  // "rank00000.safetensors"

// Sorts the parts of each tensor by their rows. Errors (kBadInput): rows that no part has, or two
// (names tensor, rows and ranks).
void require_each_row_once(Manifest& manifest);

// Errors (kBadInput): a number of `info` that JSON lacks (infinite, not a number).
std::string manifest_text(const Manifest& manifest);

// Errors (kBadInput): no checkpoint there (says whether a save was broken off); no manifest of this
// version; rows that are not there exactly once.
Manifest read_manifest(const std::filesystem::path& folder);

}  // namespace shardproof::fsdp
