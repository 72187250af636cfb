// The module that holds what links CUDA: see comm/nccl_backend.h.
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "comm/nccl_backend.h"

extern "C" __attribute__((visibility("default"))) c10::intrusive_ptr<c10d::Backend>
shardproof_make_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                             std::chrono::milliseconds timeout, at::Device device) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  auto backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size, options);
  backend->setBoundDeviceId(device);
  return backend;
}

extern "C" __attribute__((visibility("default"))) std::string shardproof_nccl_trace_json() {
  return c10d::dump_nccl_trace_json(/*includeCollectives=*/true, /*onlyActive=*/false);
}
