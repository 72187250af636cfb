// Ends a rank's process when its world cannot go on: another rank has failed, no longer answers, or
// does not come to a collective that this one waits in.
#pragma once
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/recording_backend.h"
#include "comm/rendezvous.h"

namespace shardproof::comm {

// How far rank `rank` was when its watchdog last looked: "rank 1: 9 collective(s), the last
// all_to_all in group 'ulysses', tag 'out.head_to_seq'".
std::string rank_progress(c10d::Store& store, int rank);

// Two threads, as the rank's own may be inside a collective that will never end: one beats for this
// rank and looks at the others every half second; a second one notices when the store does not
// answer the first, for a question over a cut cable waits for hours.
class Watchdog {
 public:
  // Where a rank that fails leaves its message.
  static constexpr const char* kFailure = "failure";

  // `store`: a connection of its own. `unfinished`: collectives that have been issued and have not
  // ended, where waits do not end by themselves (NCCL); may be empty. Anything that lasts longer
  // than `timeout` ends the process with exit code 4 and a message.
  Watchdog(c10::intrusive_ptr<c10d::Store> store, const Rendezvous& rendezvous,
           std::chrono::milliseconds timeout, std::shared_ptr<const CallLog> log,
           std::function<std::vector<std::string>()> unfinished);
  ~Watchdog();

 private:
  using Clock = std::chrono::steady_clock;
  struct Beat {
    int64_t count = -1;
    Clock::time_point since = Clock::now();
  };

  void watch();
  void guard();
  bool closing_within(std::chrono::milliseconds time);
  void beat();
  void look_at_ranks();
  void look_at_collectives();
  [[noreturn]] void end(const std::string& why);

  c10::intrusive_ptr<c10d::Store> store_;
  const Rendezvous& rendezvous_;
  std::chrono::milliseconds timeout_;
  std::shared_ptr<const CallLog> log_;
  std::function<std::vector<std::string>()> unfinished_;
  std::vector<Beat> beats_;
  std::map<std::string, Clock::time_point> waiting_;  // unfinished collectives, when first seen
  std::mutex mutex_;
  std::condition_variable wake_;
  bool closing_ = false;
  std::atomic<Clock::time_point> answered_ = Clock::now();
  std::thread guard_, thread_;  // last: they use all above
};

}  // namespace shardproof::comm
