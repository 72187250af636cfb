// What makes a thread a rank's.
#pragma once
#include <ATen/Parallel.h>
#include <c10/core/AutogradState.h>

namespace shardproof::sim {

// While it lives, this thread computes with one intra-op thread, and its backward passes run on
// itself: on a device they would share one thread of the engine, and the first that waits for
// another rank would stop all.
class RankThread {
 public:
  RankThread()
      // A thread's first parallel operation would set the process's number of threads again, over
      // what is set before it; asking for the number counts as one.
      : threads_(at::get_num_threads()),
        multithreading_(c10::AutogradState::get_tls_state().get_multithreading_enabled()) {
    at::set_num_threads(1);
    c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
  }
  ~RankThread() {
    c10::AutogradState::get_tls_state().set_multithreading_enabled(multithreading_);
    at::set_num_threads(threads_);
  }
  RankThread(const RankThread&) = delete;
  RankThread& operator=(const RankThread&) = delete;

 private:
  int threads_;
  bool multithreading_;
};

}  // namespace shardproof::sim
