// What `shardproof inspect` says, for people and as JSON: the same numbers.
#pragma once
#include <memory>
#include <string>

#include "models/work_sharing.h"

namespace shardproof::cli {

struct Inspection {
  std::string path;
  std::unique_ptr<models::Transformer> model;
  int64_t parameters = 0;    // without buffers
  int64_t weight_files = 0;  // safetensors beside the configuration
  int64_t weight_bytes = 0;
  models::SampleSize size;
  comm::MeshShape mesh;
  models::ParallelOptions options;
  models::WorkSharing sharing;
};

std::string to_text(const Inspection& inspection);
std::string to_json(const Inspection& inspection);

}  // namespace shardproof::cli
