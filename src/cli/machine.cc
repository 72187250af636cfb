#include "cli/machine.h"

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
