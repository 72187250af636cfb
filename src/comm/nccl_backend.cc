#include "comm/nccl_backend.h"

#include <dlfcn.h>

#include <filesystem>

#include "base/error.h"

namespace shardproof::comm {

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int size,
                                                    std::chrono::milliseconds timeout,
                                                    at::Device device) {
  const auto folder = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  const std::string module = (folder / "shardproof_nccl.so").string();
  static void* handle = dlopen(module.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (!handle) {
    const char* why = dlerror();
    throw_error(ErrorKind::kMissing,
                "--transport nccl: cannot load {} ({}); it is built where the CUDA toolkit's and "
                "NCCL's headers are",
                module, why ? why : "no reason given");
  }
  static const auto make = reinterpret_cast<MakeNcclBackend>(dlsym(handle, kMakeNcclBackend));
  SP_CHECK(make != nullptr, "{} has no {}", module, kMakeNcclBackend);
  return make(store, rank, size, timeout, device);
}

}  // namespace shardproof::comm
