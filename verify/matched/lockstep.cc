#include "verify/matched/lockstep.h"

#include <ATen/ATen.h>

#include <thread>

#include "base/error.h"
#include "sim/rank_thread.h"

namespace shardproof::verify {

Lockstep::Lockstep(int members, at::Device device)
    : members_(members),
      device_(device),
      given_(static_cast<size_t>(members)),
      results_(static_cast<size_t>(members)) {}

void Lockstep::run(const std::function<void(int)>& program) {
  error_ = nullptr;
  arrived_ = 0;
  std::vector<std::thread> threads;
  for (int member = 0; member < members_; ++member) {
    threads.emplace_back([&, member] {
      const sim::RankThread settings;
      const c10::OptionalDeviceGuard device(device_);
      try {
        program(member);
      } catch (const Abandoned&) {
      } catch (...) {
        fail(std::current_exception());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (error_) std::rethrow_exception(error_);
}

void Lockstep::fail(std::exception_ptr error) {
  {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = std::move(error);
  }
  changed_.notify_all();
}

Lockstep::Values Lockstep::meet(int member, const std::string& what, Values mine,
                                const Compute& compute) {
  std::unique_lock lock(mutex_);
  if (error_) throw Abandoned{};
  if (arrived_ == 0) what_ = what;
  SP_CHECK(what == what_, "member {} meets the others in {} while they are in {}", member, what,
           what_);
  given_[static_cast<size_t>(member)] = std::move(mine);
  if (++arrived_ == members_) {
    results_ = compute(given_);
    given_.assign(static_cast<size_t>(members_), {});
    arrived_ = 0;
    ++meeting_;
    lock.unlock();
    changed_.notify_all();
    lock.lock();
  } else {
    const int64_t meeting = meeting_;
    changed_.wait(lock, [&] { return error_ || meeting_ != meeting; });
    if (meeting_ == meeting) throw Abandoned{};
  }
  return std::move(results_[static_cast<size_t>(member)]);
}

}  // namespace shardproof::verify
