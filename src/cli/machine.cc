#include "cli/machine.h"

#include <ATen/Context.h>
#include <ATen/Version.h>
#include <dlfcn.h>
#include <sys/utsname.h>
#include <torch/version.h>

#include <ctime>
#include <fstream>
#include <thread>

#include "base/error.h"

namespace shardproof::cli {
namespace {

std::string cpu_model() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

}  // namespace

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

std::map<std::string, std::string> describe_machine(at::Device device) {
  utsname system{};
  uname(&system);
  return {{"cpu", cpu_model()},
          {"cores", std::to_string(std::thread::hardware_concurrency())},
          {"device", device.str()},
          {"os", fmt::format("{} {}", system.sysname, system.machine)},
          {"torch", TORCH_VERSION}};
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

}  // namespace shardproof::cli
