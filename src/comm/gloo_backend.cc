#include "comm/gloo_backend.h"

#include <cstdlib>

#include "base/error.h"

// The headers of Gloo are the distribution's, the code is inside LibTorch; cmake/FindGloo.cmake
// runs a collective before it says that the two fit.
#ifdef USE_C10D_GLOO
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#endif

namespace shardproof::comm {

#ifdef USE_C10D_GLOO

void require_gloo() {}

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int size,
                                                    std::chrono::milliseconds timeout,
                                                    const std::string& address) {
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  options->devices = {
      interface && *interface ? c10d::ProcessGroupGloo::createDeviceForInterface(interface)
                              : c10d::ProcessGroupGloo::createDeviceForHostname(
                                    address.empty() ? "127.0.0.1" : address)};
  options->threads = 1;
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, options);
}

#else

void require_gloo() {
  throw_error(
      ErrorKind::kMissing,
      "this build has no Gloo: install libgloo-dev and build again, or use --transport nccl");
}

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<c10d::Store>&, int,
                                                    int, std::chrono::milliseconds,
                                                    const std::string&) {
  require_gloo();
  return {};
}

#endif

}  // namespace shardproof::comm
