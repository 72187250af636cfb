// c10d's NCCL backend. Its code is a module of its own, because it links the CUDA libraries: a
// program without it starts in a third of the time.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>

namespace shardproof::comm {

// Collective over the group. Errors (kMissing): the module was not built (no CUDA headers) or
// cannot be loaded.
c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int size,
                                                    std::chrono::milliseconds timeout,
                                                    at::Device device);

// What the module exports.
using MakeNcclBackend = c10::intrusive_ptr<c10d::Backend> (*)(
    const c10::intrusive_ptr<c10d::Store>&, int, int, std::chrono::milliseconds, at::Device);
inline constexpr const char* kMakeNcclBackend = "shardproof_make_nccl_backend";

}  // namespace shardproof::comm
