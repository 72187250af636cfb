// What a run of ranks must end with. Assertions belong to the main thread: what a rank finds wrong
// it throws, and the run reports it.
#pragma once
#include <stdexcept>
#include <string>

#include "sim/engine/rendezvous.h"
#include "tests/catch.h"

namespace shardproof::tests {

// For ranks' threads.
inline void expect(bool holds, const std::string& what) {
  if (!holds) throw std::logic_error("expected: " + what);
}

// The error that `run` must throw.
template <class Run>
sim::CollectiveError violation_of(Run run) {
  try {
    run();
  } catch (const sim::CollectiveError& error) {
    return error;
  }
  FAIL("expected a CollectiveError, none was thrown");
  throw std::logic_error("not reached");
}

inline void require_violation(const sim::CollectiveError& error, sim::ViolationKind kind) {
  INFO(error.what());
  REQUIRE(std::string(to_string(error.violation())) == to_string(kind));
}

// All parts occur in the message.
inline void require_text(const sim::CollectiveError& error, const std::vector<std::string>& parts) {
  INFO(error.what());
  const std::string text = error.what();
  for (const std::string& part : parts) {
    INFO("expected to read: " << part);
    REQUIRE(text.find(part) != std::string::npos);
  }
}

}  // namespace shardproof::tests
