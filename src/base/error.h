// Errors of the whole project: one exception type whose category maps to the process's exit code.
#pragma once
#include <fmt/format.h>

#include <stdexcept>
#include <string>

namespace shardproof {

// The numbers are the exit codes of the command line (see docs/design.md, CLI).
enum class ErrorKind {
  kViolation = 1,     // an equivalence or a gate does not hold
  kBadInput = 2,      // bad usage, file or configuration: the user can mend it
  kMissing = 3,       // the machine lacks something (says what)
  kInternal = 4,      // a defect of this program
  kInconclusive = 5,  // a gate that cannot decide
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }
  int exit_code() const { return static_cast<int>(kind_); }

 private:
  ErrorKind kind_;
};

// Messages say what was expected, what came, and what to do.
template <class... Args>
[[noreturn]] void throw_error(ErrorKind kind, fmt::format_string<Args...> text, Args&&... args) {
  throw Error(kind, fmt::format(text, std::forward<Args>(args)...));
}
template <class... Args>
[[noreturn]] void bad_input(fmt::format_string<Args...> text, Args&&... args) {
  throw_error(ErrorKind::kBadInput, text, std::forward<Args>(args)...);
}
template <class... Args>
[[noreturn]] void internal_error(fmt::format_string<Args...> text, Args&&... args) {
  throw_error(ErrorKind::kInternal, text, std::forward<Args>(args)...);
}

}  // namespace shardproof

// Checks of our own invariants; always on, also in release builds (NDEBUG belongs to LibTorch).
#define SP_CHECK(condition, ...)                                                                  \
  do {                                                                                            \
    if (!(condition)) {                                                                           \
      ::shardproof::internal_error("{}:{}: {} does not hold: {}", __FILE__, __LINE__, #condition, \
                                   ::fmt::format(__VA_ARGS__));                                   \
    }                                                                                             \
  } while (false)
