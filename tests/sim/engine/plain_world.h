// Ranks over plain data: the engine with vectors in place of tensors, for ThreadSanitizer. The
// parts poison, checksum and detach as SimBackend's do.
#pragma once
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "sim/engine/rendezvous.h"
#include "sim/engine/scheduler.h"

namespace shardproof::tests {

using Buffer = std::vector<double>;

class PlainPart : public sim::Part {
 public:
  // Either may be null. The caller keeps the buffers alive until the wait.
  PlainPart(const Buffer* input, Buffer* output) : input_(input), output_(output) {}

  void begin() override {
    if (input_) checksum_ = checksum();
    if (output_) output_->assign(output_->size(), std::numeric_limits<double>::quiet_NaN());
  }
  void deliver(const std::vector<std::shared_ptr<sim::Part>>&, sim::SharedResult&) override {}
  bool inputs_intact() override { return !input_ || checksum_ == checksum(); }
  void detach_inputs() override {
    if (!input_) return;
    own_ = *input_;
    input_ = &own_;
  }

  const Buffer& input() const { return *input_; }

 protected:
  static const PlainPart& at(const std::vector<std::shared_ptr<sim::Part>>& parts, size_t i) {
    return static_cast<const PlainPart&>(*parts[i]);
  }
  const Buffer* input_;
  Buffer* output_;

 private:
  uint64_t checksum() const {
    uint64_t hash = 14695981039346656037ull;  // FNV-1a
    for (const double x : *input_) {
      uint64_t bits = 0;
      std::memcpy(&bits, &x, sizeof(bits));
      for (int shift = 0; shift < 64; shift += 8)
        hash = (hash ^ (bits >> shift & 255)) * 1099511628211ull;
    }
    return hash;
  }
  uint64_t checksum_ = 0;
  Buffer own_;
};

// Equal shares for all members.
class PlainAllToAll final : public PlainPart {
 public:
  PlainAllToAll(const Buffer* input, Buffer* output, size_t me)
      : PlainPart(input, output), me_(me) {}
  void deliver(const std::vector<std::shared_ptr<sim::Part>>& members,
               sim::SharedResult&) override {
    const size_t share = output_->size() / members.size();
    for (size_t i = 0; i < members.size(); ++i) {
      for (size_t k = 0; k < share; ++k) {
        (*output_)[i * share + k] = at(members, i).input()[me_ * share + k];
      }
    }
  }

 private:
  size_t me_;
};

// Elementwise sum, computed by the first member that needs it; element 0 counts the computations.
class PlainSum final : public PlainPart {
 public:
  using PlainPart::PlainPart;
  void deliver(const std::vector<std::shared_ptr<sim::Part>>& members,
               sim::SharedResult& shared) override {
    std::lock_guard lock(shared.mutex);
    if (!shared.value) {
      auto sum = std::make_shared<Buffer>(output_->size(), 0.0);
      for (size_t i = 0; i < members.size(); ++i) {
        for (size_t k = 0; k < sum->size(); ++k) (*sum)[k] += at(members, i).input()[k];
      }
      shared.value = sum;
    }
    *output_ = *std::static_pointer_cast<Buffer>(shared.value);
  }
};

class PlainReceive final : public PlainPart {
 public:
  explicit PlainReceive(Buffer* output) : PlainPart(nullptr, output) {}
  void deliver(const std::vector<std::shared_ptr<sim::Part>>& members,
               sim::SharedResult&) override {
    *output_ = at(members, 0).input();
  }
};

// What a rank's function gets.
class PlainRank {
 public:
  using Ticket = std::shared_ptr<sim::Ticket>;

  PlainRank(sim::Scheduler& scheduler, sim::Rendezvous& rendezvous, int rank)
      : scheduler_(scheduler), rendezvous_(rendezvous), rank_(rank) {}

  int rank() const { return rank_; }
  sim::Rendezvous& rendezvous() { return rendezvous_; }
  sim::Scheduler& scheduler() { return scheduler_; }

  int64_t join(const std::string& name, const std::vector<int>& ranks) {
    return rendezvous_.join_group(rank_, name, ranks);
  }
  Ticket post(int64_t group, CollectiveCall call, std::shared_ptr<sim::Part> part) {
    return rendezvous_.post(rank_, group, std::move(call), std::move(part));
  }
  void wait(const Ticket& ticket) { rendezvous_.wait(rank_, *ticket); }

  // `members` ranks in the group, this one is number `me`.
  Ticket all_to_all(int64_t group, size_t members, size_t me, const std::string& tag,
                    const Buffer& input, Buffer& output) {
    const auto share = static_cast<int64_t>(input.size() / members);
    CollectiveCall call = described(CallKind::kAllToAll, tag);
    call.send = call.receive = std::vector<int64_t>(members, share);
    return post(group, std::move(call), std::make_shared<PlainAllToAll>(&input, &output, me));
  }
  Ticket sum(int64_t group, const std::string& tag, const Buffer& input, Buffer& output) {
    CollectiveCall call = described(CallKind::kAllReduce, tag);
    call.send = call.receive = {static_cast<int64_t>(input.size())};
    call.reduce_op = "sum";
    return post(group, std::move(call), std::make_shared<PlainSum>(&input, &output));
  }
  Ticket send(int64_t group, int peer, const std::string& tag, const Buffer& input) {
    CollectiveCall call = described(CallKind::kSend, tag);
    call.peer = peer;
    call.send = {static_cast<int64_t>(input.size())};
    return post(group, std::move(call), std::make_shared<PlainPart>(&input, nullptr));
  }
  Ticket receive(int64_t group, int peer, const std::string& tag, Buffer& output) {
    CollectiveCall call = described(CallKind::kRecv, tag);
    call.peer = peer;
    call.receive = {static_cast<int64_t>(output.size())};
    return post(group, std::move(call), std::make_shared<PlainReceive>(&output));
  }
  Ticket barrier(int64_t group, const std::string& tag) {
    CollectiveCall call;
    call.tag = tag;
    return post(group, std::move(call), std::make_shared<PlainPart>(nullptr, nullptr));
  }

  static CollectiveCall described(CallKind kind, const std::string& tag) {
    CollectiveCall call;
    call.kind = kind;
    call.tag = tag;
    call.dtype = "Double";
    return call;
  }

 private:
  sim::Scheduler& scheduler_;
  sim::Rendezvous& rendezvous_;
  int rank_;
};

class PlainWorld {
 public:
  explicit PlainWorld(int ranks, int slots = 2, uint64_t schedule_seed = 0, bool spin = false)
      : scheduler_(ranks, slots, schedule_seed, spin), rendezvous_(scheduler_) {}

  int size() const { return scheduler_.ranks(); }
  sim::Rendezvous& rendezvous() { return rendezvous_; }

  // As World::run does; one thread a rank and run.
  void run(const std::function<void(PlainRank&)>& fn) {
    scheduler_.start_run();
    rendezvous_.start_run();
    std::vector<std::thread> threads;
    for (int r = 0; r < size(); ++r) {
      threads.emplace_back([this, r, &fn] {
        scheduler_.enter(r);
        run_rank(r, fn);
        scheduler_.leave(r);
      });
    }
    for (std::thread& thread : threads) thread.join();
    rendezvous_.finish_run();
  }

 private:
  void run_rank(int r, const std::function<void(PlainRank&)>& fn) {
    try {
      PlainRank rank(scheduler_, rendezvous_, r);
      fn(rank);
      rendezvous_.rank_returned(r);
    } catch (const Error& error) {
      rendezvous_.rank_threw(r, error);
    } catch (const std::exception& error) {
      rendezvous_.rank_threw(r, Error(ErrorKind::kInternal, error.what()));
    }
  }

  sim::Scheduler scheduler_;
  sim::Rendezvous rendezvous_;
};

inline std::vector<int> all_ranks(int n) {
  std::vector<int> ranks;
  for (int r = 0; r < n; ++r) ranks.push_back(r);
  return ranks;
}

}  // namespace shardproof::tests
