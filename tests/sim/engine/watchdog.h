// Ends the test program when a test hangs: a deadlock that nobody notices must fail, not stop the
// suite. A hang is told from a busy machine by the program's own CPU time: ranks that wait for each
// other use none.
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <mutex>
#include <string>
#include <thread>

#include "tests/catch.h"

namespace shardproof::tests {

class Watchdog {
 public:
  Watchdog()
      : test_(Catch::getResultCapture().getCurrentTestName()), thread_([this] { watch(); }) {}
  ~Watchdog() {
    {
      std::lock_guard lock(mutex_);
      done_ = true;
    }
    ended_.notify_all();
    thread_.join();
  }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  void watch() {
    constexpr int kPatience = 5, kMost = 300;  // seconds: idle, in all (ranks that spin for ever)
    constexpr double kIdle = 0.005;            // seconds of CPU time
    std::unique_lock lock(mutex_);
    double used = 0;
    for (int waited = 0; waited < kMost; waited += kPatience) {
      if (ended_.wait_for(lock, std::chrono::seconds(kPatience), [this] { return done_; })) return;
      const double now = static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
      if (now - used < kIdle) break;
      used = now;
    }
    std::fprintf(stderr, "test '%s' hangs\n", test_.c_str());
    std::_Exit(1);
  }

  std::string test_;
  std::mutex mutex_;
  std::condition_variable ended_;
  bool done_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace shardproof::tests
