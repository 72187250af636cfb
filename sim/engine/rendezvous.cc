#include "sim/engine/rendezvous.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "sim/engine/issue_order.h"

namespace shardproof::sim {

const char* to_string(ViolationKind kind) {
  switch (kind) {
    case ViolationKind::kMismatch:
      return "mismatch";
    case ViolationKind::kDeadlock:
      return "deadlock";
    case ViolationKind::kRace:
      return "race";
    case ViolationKind::kUnwaited:
      return "unwaited";
    case ViolationKind::kOrder:
      return "order";
    case ViolationKind::kRankFailed:
      return "rank failed";
  }
  return "?";
}

Rendezvous::Rendezvous(Scheduler& scheduler)
    : scheduler_(scheduler), logs_(static_cast<size_t>(scheduler.ranks())) {
  scheduler_.on_stall(
      [this] { end_run(ViolationKind::kDeadlock, ErrorKind::kViolation, explain_stall()); });
}

void Rendezvous::start_run() {
  Scheduler::Lock lock(scheduler_.mutex());
  groups_.clear();
  group_ids_.clear();
  pending_.clear();
  call_names_.clear();
  ended_.reset();
  unwaited_.clear();
  logs_.assign(logs_.size(), RankLog{});
}

int64_t Rendezvous::join_group(int rank, const std::string& name, const std::vector<int>& ranks) {
  Scheduler::Lock lock(scheduler_.mutex());
  const std::set<int> unique(ranks.begin(), ranks.end());
  if (unique.size() != ranks.size() || !unique.contains(rank) || *unique.begin() < 0 ||
      *unique.rbegin() >= scheduler_.ranks()) {
    bad_input(
        "group '{}' of rank {} has members {}; expected distinct ranks of 0..{}, rank {} "
        "among them",
        name, rank, ranks, scheduler_.ranks() - 1, rank);
  }
  std::string key = fmt::format("{} {}", name, ranks);
  key += fmt::format(" #{}", logs_[static_cast<size_t>(rank)].joined[key]++);
  auto [it, is_new] = group_ids_.try_emplace(key, static_cast<int64_t>(groups_.size()));
  if (is_new) {
    groups_.push_back({name, ranks, std::vector<int64_t>(ranks.size(), 0), {}, {}});
  }
  return it->second;
}

std::shared_ptr<CallState> Rendezvous::find_call(Group& group, int64_t group_id, int member,
                                                 CollectiveCall& call, int& slot) {
  std::string key;
  std::vector<int> ranks = group.ranks;
  if (call.kind == CallKind::kSend || call.kind == CallKind::kRecv) {
    const bool sends = call.kind == CallKind::kSend;
    const auto pair = sends ? std::pair(member, call.peer) : std::pair(call.peer, member);
    call.number = (sends ? group.sent : group.received)[pair]++;
    slot = sends ? 0 : 1;
    ranks = {group.ranks[static_cast<size_t>(pair.first)],
             group.ranks[static_cast<size_t>(pair.second)]};
    key = fmt::format("{}/{}>{}/{}", group_id, pair.first, pair.second, call.number);
  } else {
    call.number = group.next_number[static_cast<size_t>(member)]++;
    slot = member;
    key = fmt::format("{}/{}", group_id, call.number);
  }
  auto& state = pending_[key];
  if (!state) {
    state = std::make_shared<CallState>();
    state->id = static_cast<int64_t>(call_names_.size());
    call_names_.push_back(fmt::format("{} of group '{}', call {}, tag '{}'", to_string(call.kind),
                                      group.name, call.number, call.tag));
    state->ranks = ranks;
    state->posted.resize(ranks.size());
    state->parts.resize(ranks.size());
  }
  auto found = state;
  if (found->arrived + 1 == static_cast<int>(ranks.size())) pending_.erase(key);
  return found;
}

void Rendezvous::check_fit(const CallState& state, int slot) {
  const CollectiveCall& mine = *state.posted[static_cast<size_t>(slot)];
  for (size_t other = 0; other < state.posted.size(); ++other) {
    if (!state.posted[other] || static_cast<int>(other) == slot) continue;
    const std::string why = mismatch(*state.posted[other], static_cast<int>(other), mine, slot);
    if (why.empty()) continue;
    end_run(
        ViolationKind::kMismatch, ErrorKind::kViolation,
        fmt::format("collective mismatch in group '{}' (ranks {}), call {}: {}\n"
                    "  rank {} issued {}, tag '{}'\n  rank {} issued {}, tag '{}'",
                    mine.group, fmt::join(state.ranks, ","), mine.number, why, state.ranks[other],
                    state.posted[other]->describe(), state.posted[other]->tag,
                    state.ranks[static_cast<size_t>(slot)], mine.describe(), mine.tag));
    return;
  }
}

void Rendezvous::log_call(int rank, const std::shared_ptr<CallState>& state,
                          const CollectiveCall& call) {
  RankLog& log = logs_[static_cast<size_t>(rank)];
  if (!log.in_step || log.steps.empty()) log.steps.emplace_back();
  log.steps.back().push_back(state->id);
  log.calls.push_back(call);
}

std::shared_ptr<Ticket> Rendezvous::post(int rank, int64_t group_id, CollectiveCall call,
                                         std::shared_ptr<Part> part) {
  part->begin();
  scheduler_.maybe_yield(rank);
  Scheduler::Lock lock(scheduler_.mutex());
  throw_if_ended(rank, lock);
  Group& group = groups_.at(static_cast<size_t>(group_id));
  const bool point_to_point = call.kind == CallKind::kSend || call.kind == CallKind::kRecv;
  if (point_to_point && (call.peer < 0 || call.peer >= static_cast<int>(group.ranks.size()))) {
    bad_input("{} in group '{}', tag '{}', rank {}: no member {}; expected one of 0..{}",
              to_string(call.kind), group.name, call.tag, rank, call.peer, group.ranks.size() - 1);
  }
  const int member = static_cast<int>(std::find(group.ranks.begin(), group.ranks.end(), rank) -
                                      group.ranks.begin());
  call.group = group.name;
  int slot = 0;
  auto state = find_call(group, group_id, member, call, slot);
  log_call(rank, state, call);
  state->posted[static_cast<size_t>(slot)] = std::move(call);
  state->parts[static_cast<size_t>(slot)] = std::move(part);
  check_fit(*state, slot);
  throw_if_ended(rank, lock);
  auto ticket = std::make_shared<Ticket>(Ticket{state, slot, false});
  logs_[static_cast<size_t>(rank)].open.push_back(ticket);
  if (++state->arrived == static_cast<int>(state->ranks.size())) {
    for (int waiting : state->waiting) scheduler_.wake(waiting);
    state->waiting.clear();
  }
  return ticket;
}

void Rendezvous::wait(int rank, Ticket& ticket) {
  if (ticket.waited) return;
  CallState& call = *ticket.call;
  const auto me = static_cast<size_t>(ticket.member);
  RankLog& log = logs_[static_cast<size_t>(rank)];
  {
    Scheduler::Lock lock(scheduler_.mutex());
    throw_if_ended(rank, lock);
    while (!call.complete()) {
      call.waiting.push_back(rank);
      log.waiting_in = ticket.call;
      log.waiting_member = ticket.member;
      scheduler_.block(rank, lock);
      throw_if_ended(rank, lock);
    }
    log.waiting_in.reset();
  }
  std::shared_ptr<Part> part = call.parts[me];
  bool withdrawn = false;
  {
    std::shared_lock reading(call.reading);
    withdrawn = call.withdrawn;
    if (!withdrawn) part->deliver(call.parts, call.shared);
  }
  if (withdrawn) {
    Scheduler::Lock lock(scheduler_.mutex());
    throw_if_ended(rank, lock);
  }
  const bool intact = part->inputs_intact();
  bool last = false;
  {
    Scheduler::Lock lock(scheduler_.mutex());
    std::erase_if(log.open, [&](const auto& t) { return t.get() == &ticket; });
    last = count_delivery(ticket);
    if (!intact) {
      const CollectiveCall& mine = *call.posted[me];
      end_run(ViolationKind::kRace, ErrorKind::kViolation,
              fmt::format("race: rank {} overwrote the input of its {} in group '{}', call {}, tag "
                          "'{}', before waiting for it",
                          rank, to_string(mine.kind), mine.group, mine.number, mine.tag));
    }
  }
  let_go(call, me, last);
  if (!intact) {
    Scheduler::Lock lock(scheduler_.mutex());
    throw_if_ended(rank, lock);
  }
}

void Rendezvous::abandon(Ticket& ticket) {
  if (ticket.waited) return;
  bool last = false;
  {
    Scheduler::Lock lock(scheduler_.mutex());
    throw_if_ended();
    last = count_delivery(ticket);  // it stays open: rank_returned() tells of it
  }
  let_go(*ticket.call, static_cast<size_t>(ticket.member), last);
}

// True for the last member.
bool Rendezvous::count_delivery(Ticket& ticket) {
  CallState& call = *ticket.call;
  ticket.waited = true;
  return ++call.deliveries == static_cast<int>(call.ranks.size());
}

void Rendezvous::let_go(CallState& call, size_t member, bool last) {
  std::unique_lock exclusive(call.reading);
  if (last) {
    call.parts.clear();  // nobody reads any more: give the buffers back
  } else if (!call.parts.empty()) {
    call.parts[member]->detach_inputs();
  }
}

void Rendezvous::begin_step(int rank) {
  Scheduler::Lock lock(scheduler_.mutex());
  RankLog& log = logs_[static_cast<size_t>(rank)];
  log.steps.emplace_back();
  log.in_step = true;
}

void Rendezvous::end_step(int rank) {
  Scheduler::Lock lock(scheduler_.mutex());
  logs_[static_cast<size_t>(rank)].in_step = false;
}

void Rendezvous::rank_returned(int rank) {
  Scheduler::Lock lock(scheduler_.mutex());
  RankLog& log = logs_[static_cast<size_t>(rank)];
  if (ended_ || log.open.empty() || !unwaited_.empty()) return;
  const Ticket& ticket = *log.open.front();
  const CollectiveCall& call = *ticket.call->posted[static_cast<size_t>(ticket.member)];
  unwaited_ = fmt::format(
      "rank {} returned without waiting for its {} in group '{}', call {}, tag '{}'{}", rank,
      to_string(call.kind), call.group, call.number, call.tag,
      log.open.size() > 1 ? fmt::format(" ({} calls in all)", log.open.size()) : std::string());
}

void Rendezvous::rank_threw(int rank, const Error& error) {
  Scheduler::Lock lock(scheduler_.mutex());
  if (ended_) return;
  logs_[static_cast<size_t>(rank)].failure = error.what();
  end_run(ViolationKind::kRankFailed, error.kind(),
          fmt::format("rank {} failed: {}", rank, error.what()));
}

void Rendezvous::finish_run() {
  Scheduler::Lock lock(scheduler_.mutex());
  throw_if_ended();
  if (!unwaited_.empty()) {
    end_run(ViolationKind::kUnwaited, ErrorKind::kViolation, unwaited_);
    throw_if_ended();
  }
  std::vector<std::vector<std::vector<int64_t>>> orders;
  for (const RankLog& log : logs_) orders.push_back(log.steps);
  const auto cycle = find_order_cycle(orders, static_cast<int64_t>(call_names_.size()));
  if (cycle.empty()) return;
  std::string text = "ranks issue their collectives in orders that contradict each other:";
  for (const OrderEdge& edge : cycle) {
    text += fmt::format("\n  rank {} issues {} before {}", edge.rank,
                        call_names_[static_cast<size_t>(edge.before)],
                        call_names_[static_cast<size_t>(edge.after)]);
  }
  end_run(ViolationKind::kOrder, ErrorKind::kViolation, text);
  throw_if_ended();
}

const std::vector<CollectiveCall>& Rendezvous::calls(int rank) const {
  return logs_.at(static_cast<size_t>(rank)).calls;
}

void Rendezvous::throw_if_ended(int rank, Scheduler::Lock& lock) {
  if (!ended_) return;
  const auto open = logs_[static_cast<size_t>(rank)].open;
  lock.unlock();
  for (const std::shared_ptr<Ticket>& ticket : open) {
    const std::unique_lock exclusive(ticket->call->reading);
    ticket->call->withdrawn = true;
  }
  lock.lock();
  throw_if_ended();
}

void Rendezvous::throw_if_ended() {
  if (ended_) throw CollectiveError(*ended_);
}

void Rendezvous::end_run(ViolationKind violation, ErrorKind kind, const std::string& sentence) {
  if (ended_) return;
  ended_.emplace(violation, kind, sentence + "\n" + rank_table());
  scheduler_.wake_all();
}

std::string Rendezvous::missing_members(const CallState& state) const {
  std::vector<int> missing;
  for (size_t i = 0; i < state.ranks.size(); ++i) {
    if (!state.posted[i]) missing.push_back(state.ranks[i]);
  }
  return fmt::format("{}", fmt::join(missing, ","));
}

std::string Rendezvous::rank_table() const {
  std::string table = fmt::format("  {:<5} {:<9} {:<12} {:>5}  {:<32} {}", "rank", "state", "group",
                                  "call", "tag", "call and who is missing");
  for (size_t r = 0; r < logs_.size(); ++r) {
    const RankLog& log = logs_[r];
    const auto state = scheduler_.state(static_cast<int>(r));
    std::string name = state == Scheduler::State::kFinished ? "returned" : "running";
    if (log.waiting_in) name = "waiting";
    if (!log.failure.empty()) name = "failed";
    table += fmt::format("\n  {:<5} {:<9}", r, name);
    if (log.waiting_in) {
      const CollectiveCall& call = *log.waiting_in->posted[static_cast<size_t>(log.waiting_member)];
      table += fmt::format(" {:<12} {:>5}  {:<32} {}", call.group, call.number, call.tag,
                           call.describe());
      // Nobody is, where all have come and do not fit, or have come and the rank is about to go on.
      const std::string missing = missing_members(*log.waiting_in);
      if (!missing.empty()) table += "; missing: rank " + missing;
    } else if (!log.calls.empty()) {
      const CollectiveCall& call = log.calls.back();
      table += fmt::format(" {:<12} {:>5}  {:<32} {} (its last call)", call.group, call.number,
                           call.tag, call.describe());
    }
  }
  return table;
}

std::string Rendezvous::explain_stall() const {
  for (const RankLog& log : logs_) {
    if (!log.waiting_in) continue;
    for (size_t i = 0; i < log.waiting_in->ranks.size(); ++i) {
      const int missing = log.waiting_in->ranks[i];
      if (log.waiting_in->posted[i]) continue;
      if (scheduler_.state(missing) == Scheduler::State::kFinished) {
        const CollectiveCall& call =
            *log.waiting_in->posted[static_cast<size_t>(log.waiting_member)];
        return fmt::format(
            "deadlock: rank {} returned without making the {} in group '{}', call "
            "{}, tag '{}', that others wait for",
            missing, to_string(call.kind), call.group, call.number, call.tag);
      }
    }
  }
  return "deadlock: every rank waits for another one (circular wait)";
}

}  // namespace shardproof::sim
