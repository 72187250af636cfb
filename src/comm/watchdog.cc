#include "comm/watchdog.h"

#include <unistd.h>

#include <cstdio>

#include "base/error.h"

namespace shardproof::comm {
namespace {

using namespace std::chrono_literals;

double seconds(std::chrono::milliseconds time) {
  return std::chrono::duration<double>(time).count();
}

std::string progress_key(int rank) { return fmt::format("progress/{}", rank); }

std::string text_of(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

}  // namespace

std::string rank_progress(c10d::Store& store, int rank) {
  if (!store.check({progress_key(rank)})) return fmt::format("rank {}: nothing yet", rank);
  return fmt::format("rank {}: {}", rank, text_of(store.get(progress_key(rank))));
}

Watchdog::Watchdog(c10::intrusive_ptr<c10d::Store> store, const Rendezvous& rendezvous,
                   std::chrono::milliseconds timeout, std::shared_ptr<const CallLog> log,
                   std::function<std::vector<std::string>()> unfinished)
    : store_(std::move(store)),
      rendezvous_(rendezvous),
      timeout_(timeout),
      log_(std::move(log)),
      unfinished_(std::move(unfinished)),
      beats_(static_cast<size_t>(rendezvous.world_size)),
      guard_([this] { guard(); }),
      thread_([this] { watch(); }) {}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  wake_.notify_all();
  thread_.join();
  guard_.join();
}

void Watchdog::watch() {
  while (!closing_within(500ms)) {
    try {
      beat();
      look_at_ranks();
      look_at_collectives();
      answered_ = Clock::now();
    } catch (const std::exception&) {
      end("the store at rank 0 is gone: rank 0 has ended or was killed");
    }
  }
  try {
    store_->add(fmt::format("left/{}", rendezvous_.rank), 1);
  } catch (const std::exception&) {  // rank 0 has left before
  }
}

void Watchdog::guard() {
  while (!closing_within(200ms)) {
    if (Clock::now() - answered_.load() < timeout_ + 1s) continue;
    end("the store at rank 0 does not answer: its machine or the network between is gone");
  }
}

bool Watchdog::closing_within(std::chrono::milliseconds time) {
  std::unique_lock lock(mutex_);
  return wake_.wait_for(lock, time, [this] { return closing_; });
}

void Watchdog::beat() {
  store_->add(fmt::format("beat/{}", rendezvous_.rank), 1);
  const std::string progress = log_->progress();
  store_->set(progress_key(rendezvous_.rank), progress);
}

void Watchdog::look_at_ranks() {
  if (store_->check({kFailure})) end(text_of(store_->get(kFailure)));
  const auto now = Clock::now();
  for (int r = 0; r < rendezvous_.world_size; ++r) {
    Beat& beat = beats_[static_cast<size_t>(r)];
    const int64_t count = store_->add(fmt::format("beat/{}", r), 0);
    if (count != beat.count || store_->add(fmt::format("left/{}", r), 0) > 0) beat = {count, now};
    if (now - beat.since < timeout_) continue;
    end(fmt::format("rank {} has not answered for {:.0f} s: it was killed, or its machine is gone",
                    r, seconds(timeout_)));
  }
}

void Watchdog::look_at_collectives() {
  if (!unfinished_) return;
  std::map<std::string, Clock::time_point> still_waiting;
  for (const std::string& name : unfinished_()) {
    const auto known = waiting_.find(name);
    const auto since = known == waiting_.end() ? Clock::now() : known->second;
    still_waiting[name] = since;
    if (Clock::now() - since < timeout_) continue;
    std::string text = fmt::format(
        "rank {} failed: its {} has not ended within {:.0f} s; who has issued less is "
        "late:",
        rendezvous_.rank, name, seconds(timeout_));
    for (int r = 0; r < rendezvous_.world_size; ++r) text += "\n  " + rank_progress(*store_, r);
    if (!store_->check({kFailure})) store_->set(kFailure, text);
    end(text);
  }
  waiting_ = std::move(still_waiting);
}

void Watchdog::end(const std::string& why) {
  fmt::print(stderr, "shardproof: rank {} ends: {}\n", rendezvous_.rank, why);
  std::fflush(nullptr);
  _exit(static_cast<int>(ErrorKind::kInternal));
}

}  // namespace shardproof::comm
