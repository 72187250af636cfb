#include "comm/device.h"

#include <ATen/Context.h>
#include <dlfcn.h>

#include "base/error.h"

namespace shardproof::comm {

at::Device compute_device(const std::string& name) {
  if (name == "cpu") return at::Device(at::kCPU);
  if (name != "cuda") bad_input("device '{}'; expected cpu or cuda", name);
  if (!dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL)) {
    throw_error(ErrorKind::kMissing,
                "--device cuda: {}; install the CUDA packages of torch, or set "
                "SHARDPROOF_TORCH to a torch that has them",
                dlerror());
  }
  if (!at::hasCUDA() || at::globalContext().getAcceleratorHooksInterface().deviceCount() == 0) {
    throw_error(ErrorKind::kMissing, "--device cuda: no CUDA device or driver on this machine");
  }
  return at::Device(at::kCUDA, 0);
}

}  // namespace shardproof::comm
