#include "fsdp/checkpoint_files.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include "base/checksum.h"
#include "base/error.h"
#include "base/json_file.h"

namespace shardproof::fsdp {

FileRecord record_of(const SafetensorsFile& file) {
  return {file.bytes().size(), checksum(file.bytes())};
}

std::string type_text(const std::string& dtype, const std::vector<int64_t>& shape) {
  return fmt::format("{} [{}]", dtype, fmt::join(shape, ","));
}

const SafetensorsFile& CheckpointFiles::open(int rank) {
  const auto known = open_.find(rank);
  if (known != open_.end()) return known->second;
  const FileRecord& expected = records_.at(static_cast<size_t>(rank));
  const SafetensorsFile file = SafetensorsFile::open(path(rank));
  const FileRecord found = record_of(file);
  if (found.bytes != expected.bytes || found.checksum != expected.checksum) {
    bad_input(
        "{} is damaged: expected {} bytes with checksum {:016x}, found {} with {:016x}. Load "
        "another checkpoint or a copy of this one",
        path(rank).string(), expected.bytes, expected.checksum, found.bytes, found.checksum);
  }
  return open_.emplace(rank, file).first->second;
}

at::Tensor CheckpointFiles::rows(const std::string& tensor, const TensorRecord& record,
                                 const StoredRows& part) {
  const SafetensorsFile& file = open(part.file);
  const SafetensorsEntry& entry = file.entry(tensor);
  const std::string expected = type_text(record.dtype, with_rows(record.shape, part.rows.size()));
  const std::string found = type_text(entry.dtype, entry.shape);
  if (found != expected) {
    bad_input("{}: tensor {}: the manifest says {}, found {}", path(part.file).string(),
              json_quoted(tensor), expected, found);
  }
  // Copied before anything is computed with them.
  return file.tensor(tensor, Alignment::kElement);
}

}  // namespace shardproof::fsdp
