// What `shardproof export` was asked for. Plain values: see verify_options.h.
#pragma once
#include <string>

namespace shardproof::cli {

struct ExportOptions {
  std::string checkpoint;  // a folder that a training run has saved
  std::string output;      // a new folder
  std::string config;      // config.json, or a folder that holds one; not with `base`
  std::string base;        // diffusers folder of the model that training started from
  std::string dtype = "as-saved";
  bool ema = false;
  bool overwrite = false;
};

// What the module exports; returns the exit code. Errors are thrown.
using RunExport = int (*)(const ExportOptions&);
inline constexpr const char* kRunExport = "shardproof_run_export";

}  // namespace shardproof::cli
