// Runs n rank threads on a limited number of slots, in an order that a seed permutes, and notices
// at once when no rank can go on. No LibTorch: ThreadSanitizer checks this code with plain data.
//
// With one slot (a CUDA device) the baton goes directly from thread to thread. The order in which
// ranks run must never change a result; the seed exists to test exactly that.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <semaphore>
#include <vector>

namespace shardproof::sim {

class Scheduler {
 public:
  using Lock = std::unique_lock<std::mutex>;

  enum class State {
    kExpected,  // will enter
    kReady,     // could run, has no slot
    kRunning,
    kBlocked,
    kFinished,
  };

  // `slots`: ranks that run at the same time. `schedule_seed` 0: lowest ready rank first.
  // `spin`: a rank that waits for its slot keeps its core busy for a moment before it sleeps.
  // Waking a sleeping core takes longer than a rank's turn between two collectives on a GPU; only
  // sensible where there is a core for every rank.
  Scheduler(int ranks, int slots, uint64_t schedule_seed, bool spin = false);

  int ranks() const { return static_cast<int>(states_.size()); }
  // Guards all states; the rendezvous shares it, so that matching and blocking are one step.
  std::mutex& mutex() { return mutex_; }

  // Called with the lock held when at least one rank is blocked and none can ever wake it.
  void on_stall(std::function<void()> callback) { on_stall_ = std::move(callback); }

  void start_run();  // every rank is expected again; call while no rank is inside

  // Calls of a rank's own thread.
  // Returns once the rank has a slot. None is given away before all ranks have entered: else the
  // operating system, not the seed, would say who runs first.
  void enter(int rank);
  void leave(int rank);
  void yield(int rank);              // lets another ready rank run, if there is one
  void maybe_yield(int rank);        // with a seed: yields at random, else does nothing
  void block(int rank, Lock& lock);  // until wake(); the lock is released meanwhile

  // With the lock held.
  void wake(int rank);
  void wake_all();
  State state(int rank) const { return states_[static_cast<size_t>(rank)]; }

 private:
  void dispatch();      // gives free slots to ready ranks
  void release_slot();  // of a running rank; then dispatches and looks for a stall
  size_t pick_ready();  // index into ready_
  void wait_for_slot(int rank, Lock& lock);

  std::mutex mutex_;
  std::function<void()> on_stall_;
  std::vector<State> states_;
  std::vector<int> ready_;
  std::vector<std::unique_ptr<std::binary_semaphore>> go_;
  int slots_;
  bool spin_;
  int running_ = 0;
  int expected_ = 0;  // ranks that have still to enter
  uint64_t seed_;
  std::mt19937_64 random_;
};

}  // namespace shardproof::sim
