// The rank files of a training checkpoint, held against its manifest before a byte is used.
#pragma once
#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "fsdp/checkpoint_manifest.h"
#include "io/safetensors.h"

namespace shardproof::fsdp {

FileRecord record_of(const SafetensorsFile& file);

// "F32 [10,4]", for messages.
std::string type_text(const std::string& dtype, const std::vector<int64_t>& shape);

class CheckpointFiles {
 public:
  // `records`: of the manifest, which must outlive the object.
  CheckpointFiles(std::filesystem::path folder, const std::vector<FileRecord>& records)
      : folder_(std::move(folder)), records_(records) {}

  // Opened and compared once, when first asked for; mapped, not read into memory. Errors
  // (kBadInput), which name the file: missing, damaged, no safetensors.
  const SafetensorsFile& open(int rank);
  // A part's rows, [part.rows.size(), ...], in the mapped file. Errors (kBadInput): as open(), and
  // a file whose tensor is not what the manifest says.
  at::Tensor rows(const std::string& tensor, const TensorRecord& record, const StoredRows& part);

 private:
  std::filesystem::path path(int rank) const { return folder_ / rank_file_name(rank); }

  std::filesystem::path folder_;
  const std::vector<FileRecord>& records_;
  std::map<int, SafetensorsFile> open_;
};

}  // namespace shardproof::fsdp
