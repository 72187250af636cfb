// Which machine a verdict speaks of.
#pragma once
#include <c10/core/Device.h>

#include <map>
#include <string>

namespace shardproof::cli {

// cpu, cores, device, os, torch: in words.
std::map<std::string, std::string> describe_machine(at::Device device);

std::string utc_now();  // ISO 8601, seconds

}  // namespace shardproof::cli
