#include "sim/world.h"

#include <ATen/ATen.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <iterator>
#include <thread>
#include <utility>

#include "base/error.h"
#include "sim/rank_thread.h"
#include "sim/sim_backend.h"

namespace shardproof::sim {

class World::Impl {
 public:
  Impl(World& world, int ranks, WorldOptions options)
      : world_(world),
        options_(std::move(options)),
        scheduler_(ranks, slots(options_), options_.schedule_seed, spins(ranks, options_)),
        rendezvous_(scheduler_),
        ledger_(ranks),
        states_(static_cast<size_t>(ranks)) {
    set_faults(options_.faults);
    at::get_num_threads();  // the caller keeps its number, whatever the ranks' threads set
  }

  ~Impl() {
    {
      std::lock_guard lock(mutex_);
      closing_ = true;
    }
    start_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void set_faults(FaultPlan faults) {
    for (const Fault& fault : faults) {
      if (fault.kind == FaultKind::kHang) {
        bad_input(
            "the fault 'hang' can be planted in real ranks only: virtual ranks share a process");
      }
    }
    options_.faults = std::move(faults);
  }

  void run(const std::function<void(RankContext&)>& fn) {
    {
      std::lock_guard lock(mutex_);
      if (adopted_) bad_input("World::run: the ranks of an adopted run have not all returned yet");
      start_threads();
      prepare();
      job_ = &fn;
      ++generation_;
      busy_ = size();
    }
    start_.notify_all();
    {
      std::unique_lock lock(mutex_);
      done_.wait(lock, [this] { return busy_ == 0; });
    }
    finish();
  }

  void adopt(int rank, const std::function<void(RankContext&)>& fn) {
    const std::shared_ptr<AdoptedRun> run = join_adopted(rank);
    {
      const RankThread settings;
      be_rank(rank, fn);
    }
    std::unique_lock lock(mutex_);
    if (++run->returned == size()) {
      adopted_.reset();
      try {
        finish();
      } catch (...) {
        run->error = std::current_exception();
      }
      run->over = true;
      done_.notify_all();
    }
    done_.wait(lock, [&] { return run->over; });
    if (run->error) std::rethrow_exception(run->error);
  }

  // All at once: one synchronisation for the whole run.
  void check_races() {
    if (deferred_.empty()) return;
    const std::vector<DeferredCheck> checks = std::exchange(deferred_, {});
    std::vector<at::Tensor> before, after;
    for (const DeferredCheck& check : checks) {
      before.push_back(check.before);
      after.push_back(check.after);
    }
    const at::Tensor changed = at::stack(before).ne(at::stack(after)).cpu();
    for (size_t i = 0; i < checks.size(); ++i) {
      if (!changed[static_cast<int64_t>(i)].item<bool>()) continue;
      throw CollectiveError(ViolationKind::kRace, ErrorKind::kViolation,
                            "race: the input was overwritten before the wait: " + checks[i].what);
    }
  }

  const WorldOptions& options() const { return options_; }
  int size() const { return scheduler_.ranks(); }
  Rendezvous& rendezvous() { return rendezvous_; }
  MemoryLedger& ledger() { return ledger_; }
  RankState& state(int rank) { return states_[static_cast<size_t>(rank)]; }

 private:
  static int slots(const WorldOptions& options) {
    if (options.cores > 0) return options.cores;
    const int cores = static_cast<int>(std::thread::hardware_concurrency());  // 0: unknown
    return options.device.is_cuda() ? 1 : std::max(cores, 1);
  }

  static bool spins(int ranks, const WorldOptions& options) {
    return options.device.is_cuda() &&
           static_cast<int>(std::thread::hardware_concurrency()) > ranks;
  }

  void prepare() {
    scheduler_.start_run();
    rendezvous_.start_run();
    ledger_.reset();
    for (int r = 0; r < size(); ++r) {
      RankState& state = states_[static_cast<size_t>(r)];
      state = RankState{};
      state.rank = r;
      state.scheduler = &scheduler_;
      state.rendezvous = &rendezvous_;
      state.device = options_.device;
      state.defaults.checks = options_.delivery_checks;
      state.defaults.memory_tracked = options_.track_memory;
      state.defaults.order = options_.reduce_order;
      state.faults = FaultMatcher(options_.faults, r);
      for (const Fault& fault : options_.faults) {
        state.keep_results |= fault.kind == FaultKind::kStale || fault.kind == FaultKind::kEcho;
      }
    }
  }

  // A run on threads of the caller; shared by them, because the first may begin the next run before
  // the last has read this one's error.
  struct AdoptedRun {
    explicit AdoptedRun(int ranks) : joined(static_cast<size_t>(ranks)) {}
    std::vector<bool> joined;
    int returned = 0;
    bool over = false;
    std::exception_ptr error;
  };

  std::shared_ptr<AdoptedRun> join_adopted(int rank) {
    if (rank < 0 || rank >= size()) {
      bad_input("World::adopt: rank {} is not in a world of {} ranks", rank, size());
    }
    std::lock_guard lock(mutex_);
    if (busy_ > 0) bad_input("World::adopt: World::run has not returned yet");
    if (!adopted_) {
      prepare();
      adopted_ = std::make_shared<AdoptedRun>(size());
    }
    if (adopted_->joined[static_cast<size_t>(rank)]) {
      bad_input("World::adopt: rank {} is already in this run; each rank joins once", rank);
    }
    adopted_->joined[static_cast<size_t>(rank)] = true;
    return adopted_;
  }

  void start_threads() {
    for (int r = static_cast<int>(threads_.size()); r < size(); ++r) {
      threads_.emplace_back([this, r] { serve(r); });
    }
  }

  void finish() {
    for (RankState& state : states_) {
      std::move(state.deferred.begin(), state.deferred.end(), std::back_inserter(deferred_));
      state.deferred.clear();
    }
    rendezvous_.finish_run();
    if (options_.check_races_every_run) check_races();
  }

  void serve(int rank) {
    const RankThread settings;
    uint64_t seen = 0;
    while (true) {
      const std::function<void(RankContext&)>* job = nullptr;
      {
        std::unique_lock lock(mutex_);
        start_.wait(lock, [&] { return closing_ || generation_ != seen; });
        if (closing_) return;
        seen = generation_;
        job = job_;
      }
      be_rank(rank, *job);
      std::lock_guard lock(mutex_);
      if (--busy_ == 0) done_.notify_all();
    }
  }

  void be_rank(int rank, const std::function<void(RankContext&)>& fn) {
    scheduler_.enter(rank);
    run_guarded(rank, fn);
    scheduler_.leave(rank);
  }

  void run_guarded(int rank, const std::function<void(RankContext&)>& fn) {
    std::optional<c10::DebugInfoGuard> memory;
    if (options_.track_memory) {
      memory.emplace(c10::DebugInfoKind::PROFILER_STATE, ledger_.reporter(rank));
    }
    try {
      RankContext context(world_, rank);
      fn(context);
      rendezvous_.rank_returned(rank);
    } catch (const Error& error) {
      rendezvous_.rank_threw(rank, error);
    } catch (const c10::Error& error) {
      rendezvous_.rank_threw(rank, Error(ErrorKind::kInternal, error.what_without_backtrace()));
    } catch (const std::exception& error) {
      rendezvous_.rank_threw(rank, Error(ErrorKind::kInternal, error.what()));
    } catch (...) {
      rendezvous_.rank_threw(rank, Error(ErrorKind::kInternal, "an exception of unknown type"));
    }
  }

  World& world_;
  WorldOptions options_;
  Scheduler scheduler_;
  Rendezvous rendezvous_;
  MemoryLedger ledger_;
  std::vector<RankState> states_;
  std::vector<DeferredCheck> deferred_;

  std::mutex mutex_;
  std::condition_variable start_, done_;
  const std::function<void(RankContext&)>* job_ = nullptr;
  uint64_t generation_ = 0;
  int busy_ = 0;
  bool closing_ = false;
  std::shared_ptr<AdoptedRun> adopted_;
  std::vector<std::thread> threads_;  // of run(), from its first call; last: they use all above
};

int RankContext::world_size() const { return world_.size(); }
at::Device RankContext::device() const { return world_.options().device; }

c10::intrusive_ptr<c10d::Backend> RankContext::create(const std::string& name,
                                                      const std::vector<int>& ranks) {
  const int64_t group = world_.impl_->rendezvous().join_group(rank_, name, ranks);
  const auto index = std::find(ranks.begin(), ranks.end(), rank_) - ranks.begin();
  return c10::make_intrusive<SimBackend>(world_.impl_->state(rank_), group, name,
                                         static_cast<int>(index), static_cast<int>(ranks.size()));
}

World::World(int ranks, WorldOptions options) {
  if (ranks < 1) bad_input("a world needs at least one rank; got {}", ranks);
  impl_ = std::make_unique<Impl>(*this, ranks, std::move(options));
}
World::~World() = default;

int World::size() const { return impl_->size(); }
const WorldOptions& World::options() const { return impl_->options(); }
void World::set_faults(FaultPlan faults) { impl_->set_faults(std::move(faults)); }
void World::run(const std::function<void(RankContext&)>& fn) { impl_->run(fn); }
void World::adopt(int rank, const std::function<void(RankContext&)>& fn) { impl_->adopt(rank, fn); }
void World::check_races() { impl_->check_races(); }
const std::vector<CollectiveCall>& World::calls(int rank) const {
  return impl_->rendezvous().calls(rank);
}
MemoryUse World::memory(int rank) const {
  SP_CHECK(options().track_memory, "the world was made without track_memory");
  return impl_->ledger().use(rank);
}
void World::restart_peak(int rank) {
  SP_CHECK(options().track_memory, "the world was made without track_memory");
  impl_->ledger().restart_peak(rank);
}

}  // namespace shardproof::sim
