#include "base/run_main.h"

#include <unistd.h>

#include <cstdio>

#include "base/error.h"

namespace shardproof {

void run_main(const char* program, const std::function<int()>& run) {
  int code = 0;
  try {
    code = run();
  } catch (const Error& error) {
    fmt::print(stderr, "{}: {}\n", program, error.what());
    code = error.exit_code();
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}: internal error: {}\n", program, error.what());
    code = static_cast<int>(ErrorKind::kInternal);
  }
  std::fflush(nullptr);
  _exit(code);
}

}  // namespace shardproof
