// A training checkpoint as a model that diffusers loads: the shards of any world put together, in
// one process.
//
//   <folder>/diffusion_pytorch_model.safetensors    diffusers' names and shapes
//   <folder>/config.json                            if the configuration is known
//
// or, where low-rank adapters (LoRA) were trained, a peft folder (see models/lora.h): the base
// weights are frozen then and not in the checkpoint.
#pragma once
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <optional>

namespace shardproof::fsdp {

struct ExportOptions {
  // config.json of the model, or a folder that holds one; empty: what the manifest says. A known
  // configuration is what names and shapes are held to.
  std::filesystem::path config;
  // A diffusers folder with the model that training started from: its configuration, and those
  // tensors that a checkpoint does not hold (frozen parameters, buffers). Not with `config`.
  std::filesystem::path base;
  std::optional<c10::ScalarType> dtype;  // of all floating tensors; nothing: as saved
  bool average = false;                  // the moving average (EMA) of the parameters
  bool overwrite = false;                // replaces an older export
};

struct ExportReport {
  int64_t tensors = 0, elements = 0;
  int64_t from_base = 0;  // of the tensors
  int64_t step = 0;       // of the checkpoint
  bool adapters = false;  // a peft folder
  bool checked = false;   // names and shapes are those of a configuration
};

// Needs no world. Memory: one tensor at a time (adapters, which are small, together); files are
// mapped. All files that hold a part are compared with their checksums before anything is written.
// The folder appears as a whole, or not at all; one that is replaced is exchanged in one step.
//
// Errors (kBadInput), with nothing left behind and an older export untouched: no checkpoint; a
// missing or damaged file of it (names the file); no averages, or no parameters, in it; a folder
// that is there already and may not be replaced, or that holds files of no export; parameters that
// are not the configuration's, or that are missing (says what is needed); adapters beside other
// parameters, or without a known scale; a value that `dtype` cannot hold; what cannot be written.
ExportReport export_model(const std::filesystem::path& checkpoint,
                          const std::filesystem::path& folder, const ExportOptions& options);

}  // namespace shardproof::fsdp
