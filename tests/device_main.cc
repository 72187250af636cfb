// The main of suites that run on a device. It exits with 77, which ctest calls skipped, where this
// machine lacks the device: tests that did not run must not count as passed.
#define CATCH_CONFIG_RUNNER
#include "tests/device.h"

#include "tests/catch.h"

#include <fmt/format.h>

#include <cstdio>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "comm/device.h"

namespace shardproof::tests {
namespace {

at::Device chosen(at::kCPU);

constexpr int kSkipped = 77;

// Takes --device and its value out of the words, which Catch does not know.
std::string take_device(std::vector<char*>& words) {
  for (size_t i = 1; i + 1 < words.size(); ++i) {
    if (std::string_view(words[i]) != "--device") continue;
    const std::string name = words[i + 1];
    words.erase(words.begin() + static_cast<ptrdiff_t>(i),
                words.begin() + static_cast<ptrdiff_t>(i + 2));
    return name;
  }
  return "cpu";
}

int run(std::vector<char*> words) {
  try {
    chosen = comm::compute_device(take_device(words));
  } catch (const Error& error) {
    fmt::print(stderr, "{}\n", error.what());
    return error.kind() == ErrorKind::kMissing ? kSkipped : error.exit_code();
  }
  return Catch::Session().run(static_cast<int>(words.size()), words.data());
}

}  // namespace

at::Device device() { return chosen; }

}  // namespace shardproof::tests

int main(int argc, char** argv) { return shardproof::tests::run({argv, argv + argc}); }
