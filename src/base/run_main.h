// The body of a program's main(): errors to stderr, their category as the exit code.
#pragma once
#include <functional>

namespace shardproof {

// Ends the process with what `run` returns, or after an error with its exit code. Nothing is
// destroyed after `run`: LibTorch's static destructors take a tenth of a second and free what the
// process's end frees anyway. Standard streams are flushed.
[[noreturn]] void run_main(const char* program, const std::function<int()>& run);

}  // namespace shardproof
