// What `shardproof inspect` was asked for. Plain values: see verify_options.h.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

namespace shardproof::cli {

struct InspectOptions {
  std::string path;  // config.json, or a folder that holds one
  std::string mesh = "dp1.ring1.ulysses1";
  std::string size = "1024x1024";  // height x width in pixels
  std::optional<int64_t> frames;   // missing: 81 for video, 1 for images
  std::optional<int64_t> text;     // tokens; missing: what the model's pipeline gives
  int64_t batch = 1;               // samples a replica
  std::string token_split = "uneven";
  std::string head_split = "even";
  std::string ring_mode = "rotate";
  std::string text_placement = "sharded";
  std::string json;
};

// What the module exports; returns the exit code. Errors are thrown.
using RunInspect = int (*)(const InspectOptions&);
inline constexpr const char* kRunInspect = "shardproof_run_inspect";

}  // namespace shardproof::cli
