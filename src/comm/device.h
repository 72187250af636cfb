// The device that a program computes on.
#pragma once
#include <c10/core/Device.h>

#include <string>

namespace shardproof::comm {

// "cpu" or "cuda". For CUDA it loads LibTorch's CUDA library, which must happen before the first
// tensor operation: that one would leave stubs in the library's place for ever. Errors: kBadInput
// (another name), kMissing (no library, driver or device).
at::Device compute_device(const std::string& name, int index = 0);

}  // namespace shardproof::comm
