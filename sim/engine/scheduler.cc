#include "sim/engine/scheduler.h"

#include <algorithm>
#include <chrono>

#include "base/error.h"

namespace shardproof::sim {

Scheduler::Scheduler(int ranks, int slots, uint64_t schedule_seed, bool spin)
    : states_(static_cast<size_t>(ranks), State::kFinished),
      slots_(slots),
      spin_(spin),
      seed_(schedule_seed) {
  SP_CHECK(ranks > 0 && slots > 0, "ranks={} slots={}", ranks, slots);
  for (int r = 0; r < ranks; ++r) go_.push_back(std::make_unique<std::binary_semaphore>(0));
}

void Scheduler::start_run() {
  Lock lock(mutex_);
  SP_CHECK(running_ == 0 && ready_.empty(), "a run is still going on");
  std::fill(states_.begin(), states_.end(), State::kExpected);
  expected_ = ranks();
  random_.seed(seed_);
}

size_t Scheduler::pick_ready() {
  if (seed_ != 0) return static_cast<size_t>(random_() % ready_.size());
  return static_cast<size_t>(std::min_element(ready_.begin(), ready_.end()) - ready_.begin());
}

void Scheduler::dispatch() {
  if (expected_ > 0) return;
  while (running_ < slots_ && !ready_.empty()) {
    const size_t i = pick_ready();
    const int rank = ready_[i];
    ready_.erase(ready_.begin() + static_cast<std::ptrdiff_t>(i));
    states_[static_cast<size_t>(rank)] = State::kRunning;
    ++running_;
    go_[static_cast<size_t>(rank)]->release();
  }
}

void Scheduler::release_slot() {
  --running_;
  dispatch();
  if (running_ > 0) return;
  const bool blocked =
      std::any_of(states_.begin(), states_.end(), [](State s) { return s == State::kBlocked; });
  if (blocked && on_stall_) {
    on_stall_();
    dispatch();
  }
}

void Scheduler::wait_for_slot(int rank, Lock& lock) {
  lock.unlock();
  std::binary_semaphore& go = *go_[static_cast<size_t>(rank)];
  bool acquired = false;
  if (spin_) {
    using Clock = std::chrono::steady_clock;
    const auto end = Clock::now() + std::chrono::milliseconds(2);
    while (!(acquired = go.try_acquire()) && Clock::now() < end) {
    }
  }
  if (!acquired) go.acquire();
  lock.lock();
}

void Scheduler::enter(int rank) {
  Lock lock(mutex_);
  SP_CHECK(state(rank) == State::kExpected, "rank {} entered twice", rank);
  states_[static_cast<size_t>(rank)] = State::kReady;
  ready_.push_back(rank);
  // With one slot the run is a function of the seed alone, whatever order the threads come in.
  if (--expected_ == 0) std::sort(ready_.begin(), ready_.end());
  dispatch();
  wait_for_slot(rank, lock);
}

void Scheduler::leave(int rank) {
  Lock lock(mutex_);
  states_[static_cast<size_t>(rank)] = State::kFinished;
  release_slot();
}

void Scheduler::yield(int rank) {
  Lock lock(mutex_);
  if (ready_.empty()) return;
  states_[static_cast<size_t>(rank)] = State::kReady;
  release_slot();  // before this rank is ready itself: the slot goes to another one
  ready_.push_back(rank);
  dispatch();
  wait_for_slot(rank, lock);
}

void Scheduler::maybe_yield(int rank) {
  if (seed_ == 0) return;
  {
    Lock lock(mutex_);
    if (random_() % 2 == 0) return;
  }
  yield(rank);
}

void Scheduler::block(int rank, Lock& lock) {
  states_[static_cast<size_t>(rank)] = State::kBlocked;
  release_slot();
  wait_for_slot(rank, lock);
}

void Scheduler::wake(int rank) {
  State& s = states_[static_cast<size_t>(rank)];
  if (s != State::kBlocked) return;
  s = State::kReady;
  ready_.push_back(rank);
  dispatch();
}

void Scheduler::wake_all() {
  for (int r = 0; r < ranks(); ++r) wake(r);
}

}  // namespace shardproof::sim
