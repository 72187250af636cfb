// c10d's Gloo backend: ranks are processes, tensors are on the CPU.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>

namespace shardproof::comm {

// Errors (kMissing): this build has no Gloo.
void require_gloo();

// Collective over the group. `address`: of the interface to listen on, a name or number of this
// host; empty: 127.0.0.1 (one host). GLOO_SOCKET_IFNAME, the name of an interface, wins over it.
// Errors (kMissing): built without Gloo's headers.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int size,
                                                    std::chrono::milliseconds timeout,
                                                    const std::string& address);

}  // namespace shardproof::comm
