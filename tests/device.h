// The device that a suite runs on: `test_fsdp --device cuda` runs the same tests on the first GPU.
// The CPU without the option.
#pragma once
#include <c10/core/Device.h>

namespace shardproof::tests {

at::Device device();

}  // namespace shardproof::tests
