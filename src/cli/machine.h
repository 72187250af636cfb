// Which machine a verdict speaks of, and its devices.
#pragma once
#include <c10/core/Device.h>

#include <map>
#include <string>

namespace shardproof::cli {

// "cpu" or "cuda". For CUDA it loads LibTorch's CUDA library, which must happen before the first
// tensor operation. Errors: kBadInput (another name), kMissing (no library, driver or device).
at::Device compute_device(const std::string& name);

// cpu, cores, device, os, torch: in words.
std::map<std::string, std::string> describe_machine(at::Device device);

std::string utc_now();  // ISO 8601, seconds

}  // namespace shardproof::cli
