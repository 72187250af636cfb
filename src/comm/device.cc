#include "comm/device.h"

#include <ATen/Context.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>

#include "base/error.h"

namespace shardproof::comm {

at::Device compute_device(const std::string& name, int index) {
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
  const int count = at::globalContext().getAcceleratorHooksInterface().deviceCount();
  if (index >= count) {
    throw_error(ErrorKind::kMissing,
                "no CUDA device for local rank {}: {} visible here; start fewer ranks, or let them "
                "share a GPU with launch --share-gpu",
                index, count);
  }
  const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(index));
  c10::impl::getDeviceGuardImpl(at::kCUDA)->setDevice(device);
  return device;
}

}  // namespace shardproof::comm
