// Matches the collective calls of all ranks, delivers them, and explains what does not match.
// No LibTorch: see part.h for what stands in for the data.
//
// Rules. Per group, the k-th call of every member must agree in kind, dtype, sizes, root, reduce
// operation and tag. Sends and receives match per pair of ranks, in order; a send completes only
// when its receive is posted, as NCCL promises no buffering. A mismatch, a caller that never comes,
// a cycle of waits and a rank that throws end the run at once with a table of all ranks. The order
// in which ranks issue calls over *all* their groups must have no cycle either: such a program can
// deadlock on another machine although this run happened to finish.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <string>
#include <vector>

#include "base/collective_call.h"
#include "base/error.h"
#include "sim/engine/part.h"
#include "sim/engine/scheduler.h"

namespace shardproof::sim {

enum class ViolationKind {
  kMismatch,   // two members' calls do not fit together
  kDeadlock,   // nobody can go on
  kRace,       // a buffer in flight was overwritten
  kUnwaited,   // a call whose result was never waited for
  kOrder,      // ranks issue calls of several groups in orders that contradict each other
  kRankFailed  // a rank threw; the others can never complete
};
const char* to_string(ViolationKind kind);

// What ends a run. what() holds one sentence and a table of all ranks.
class CollectiveError : public Error {
 public:
  CollectiveError(ViolationKind violation, ErrorKind kind, const std::string& text)
      : Error(kind, text), violation_(violation) {}
  ViolationKind violation() const { return violation_; }
  // Every rank's function returned: what they computed is there.
  bool ranks_returned() const {
    return violation_ == ViolationKind::kUnwaited || violation_ == ViolationKind::kOrder;
  }

 private:
  ViolationKind violation_;
};

// One collective instance over the members of a group.
struct CallState {
  int64_t id = 0;
  std::vector<int> ranks;  // world ranks of the members
  std::vector<std::optional<CollectiveCall>> posted;
  std::vector<std::shared_ptr<Part>> parts;
  int arrived = 0;
  int deliveries = 0;
  std::vector<int> waiting;   // ranks blocked in this call
  std::shared_mutex reading;  // shared: deliver(); exclusive: detach_inputs()
  bool withdrawn = false;     // under `reading`: a member unwinds, what it posted may be gone
  SharedResult shared;

  bool complete() const { return arrived == static_cast<int>(ranks.size()); }
};

// A rank's claim on a call that it has posted.
struct Ticket {
  std::shared_ptr<CallState> call;
  int member = 0;
  bool waited = false;
};

class Rendezvous {
 public:
  explicit Rendezvous(Scheduler& scheduler);

  void start_run();

  // The group that `ranks` form under `name`; every member must ask in the same order. Returns a
  // handle for post(). Errors: a rank outside the world, or twice.
  int64_t join_group(int rank, const std::string& name, const std::vector<int>& ranks);

  // Never blocks. Fills in `call.group` and `call.number`. Throws CollectiveError on a mismatch.
  // Errors (kBadInput): a send or receive whose peer is no member.
  std::shared_ptr<Ticket> post(int rank, int64_t group, CollectiveCall call,
                               std::shared_ptr<Part> part);

  // Blocks until all members have posted, then delivers to `rank`. A second wait does nothing.
  void wait(int rank, Ticket& ticket);

  // In place of wait(), for a wait that the program forgot (a planted fault): nothing is delivered,
  // the buffers are the caller's again, the other members get what was posted. The call counts as
  // one that was never waited for.
  void abandon(Ticket& ticket);

  // Calls between begin_step and end_step are issued together (a ring's send and receive): no
  // order among them.
  void begin_step(int rank);
  void end_step(int rank);

  // The rank's function returned or threw.
  void rank_returned(int rank);
  void rank_threw(int rank, const Error& error);
  // After all ranks have left: throws what ended the run, or what the whole run violated.
  void finish_run();

  // All calls that `rank` has posted in this run, in order.
  const std::vector<CollectiveCall>& calls(int rank) const;

 private:
  struct Group {
    std::string name;
    std::vector<int> ranks;
    std::vector<int64_t> next_number;                       // per member
    std::map<std::pair<int, int>, int64_t> sent, received;  // (from, to) -> count
  };
  struct RankLog {
    std::vector<std::vector<int64_t>> steps;  // ids of calls, issued together
    std::vector<CollectiveCall> calls;
    std::vector<std::shared_ptr<Ticket>> open;
    std::map<std::string, int> joined;
    std::shared_ptr<CallState> waiting_in;
    int waiting_member = 0;
    bool in_step = false;
    std::string failure;
  };

  std::shared_ptr<CallState> find_call(Group& group, int64_t group_id, int member,
                                       CollectiveCall& call, int& slot);
  // Ends the run if the call does not fit those of the members that have posted.
  void check_fit(const CallState& state, int slot);
  static bool count_delivery(Ticket& ticket);
  static void let_go(CallState& call, size_t member, bool last);
  void log_call(int rank, const std::shared_ptr<CallState>& state, const CollectiveCall& call);
  void throw_if_ended();
  // The same for a rank whose buffers others may be reading: they finish first, and none begins.
  void throw_if_ended(int rank, Scheduler::Lock& lock);
  void end_run(ViolationKind violation, ErrorKind kind, const std::string& sentence);
  std::string rank_table() const;
  std::string missing_members(const CallState& state) const;
  std::string explain_stall() const;

  Scheduler& scheduler_;
  std::vector<Group> groups_;
  std::map<std::string, int64_t> group_ids_;
  std::map<std::string, std::shared_ptr<CallState>> pending_;  // not all members have posted
  std::vector<RankLog> logs_;
  std::vector<std::string> call_names_;  // by call id, for the order check's message
  std::optional<CollectiveError> ended_;
  std::string unwaited_;  // said when all have returned: others may still complete
};

}  // namespace shardproof::sim
