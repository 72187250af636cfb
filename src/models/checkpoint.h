// diffusers' model folders: config.json and one safetensors file, or several with an index.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>

#include "models/transformer.h"

namespace shardproof::models {

struct LoadedModel {
  std::unique_ptr<Transformer> model;
  ParameterSet parameters;  // on the CPU, in the files' dtypes, at any alignment: use leaves()
};

// Told how many of the model's tensors are there. Calls come from several threads, one at a time,
// with `done` growing by one up to `all`. What it throws ends the loading.
using LoadProgress = std::function<void(int64_t done, int64_t all)>;

// `folder`: config.json and one of model.safetensors, diffusion_pytorch_model.safetensors and
// diffusion_pytorch_model.safetensors.index.json (with the shards that it names).
//
// Files are mapped, not read, so that loading takes megabytes whatever their size, and a tensor's
// pages are read when it is used (Alignment::kElement, see io/safetensors.h, also for the rule that
// files may be replaced but not changed in place). Shards are opened in parallel.
//
// Errors (kBadInput), all that is wrong with the folder in one, in an order that does not depend on
// threads: a bad configuration; no weights, or two forms of them, of which one must be out of date;
// damaged or missing files; an index that names anything but files in the folder (they may be
// symbolic links), or a file without the tensor; missing or surplus tensors; one in two files;
// wrong shapes; dtypes other than F64, F32, F16 and BF16.
LoadedModel load_model(const std::filesystem::path& folder, const LoadProgress& progress = {});

// Writes the same form, in shards of at most `shard_bytes` (or of one tensor), and removes the
// weights that the folder held. The new files are complete and on the disk, in a folder beside
// them, before any old one is touched: whatever fails until then leaves the old model. A crash
// after it leaves the old model, the new one, or none (the index, or the single file, is put there
// last), never a mixture. Tensors may be views of the files that are replaced.
//
// Errors (kBadInput): parameters that are not those of `config`'s model (adapters go into a folder
// of their own: save_lora); a dtype that load_model would refuse; files that cannot be written.
void save_model(const std::filesystem::path& folder, const JsonValue& config,
                const ParameterSet& parameters, int64_t shard_bytes = int64_t{10} << 30);

}  // namespace shardproof::models
