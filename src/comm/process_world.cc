#include "comm/process_world.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/error.h"
#include "comm/gloo_backend.h"
#include "comm/nccl_backend.h"
#include "comm/watchdog.h"

namespace shardproof::comm {
namespace {

using namespace std::chrono_literals;

constexpr size_t kChunk = size_t{4} << 20;  // the store takes values of up to 8 MB

std::string to_text(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

c10::intrusive_ptr<c10d::Store> connect(const Rendezvous& r, std::chrono::milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(r.port);
  options.isServer = r.rank == 0 && !r.store_is_there;
  options.numWorkers = std::nullopt;  // who is missing is found out below, by name
  options.waitWorkers = false;
  options.timeout = timeout;
  try {
    return c10::make_intrusive<c10d::TCPStore>(r.host, options);
  } catch (const std::exception& error) {
    const std::string text = error.what();
    const std::string why = text.substr(0, text.find('\n'));
    if (options.isServer) {
      throw_error(ErrorKind::kMissing,
                  "rank 0 cannot serve the store at {}:{} ({}): {}; choose another MASTER_PORT, or "
                  "end what listens there",
                  r.host, r.port, r.source, why);
    }
    throw_error(
        ErrorKind::kMissing,
        "rank {}: no store at {}:{} ({}): {}; is rank 0 running, and is MASTER_ADDR its host?",
        r.rank, r.host, r.port, r.source, why);
  }
}

// This host's address on the way to the store: where the other hosts can reach it. Nothing is sent:
// connecting a datagram socket only chooses the interface.
std::string address_towards(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) {
    bad_input("cannot find the host '{}' of the store; check MASTER_ADDR", host);
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owned(found, freeaddrinfo);
  char name[NI_MAXHOST] = {};
  const int fd = socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  sockaddr_storage local{};
  socklen_t size = sizeof(local);
  const bool known = fd >= 0 && ::connect(fd, found->ai_addr, found->ai_addrlen) == 0 &&
                     getsockname(fd, reinterpret_cast<sockaddr*>(&local), &size) == 0 &&
                     getnameinfo(reinterpret_cast<sockaddr*>(&local), size, name, sizeof(name),
                                 nullptr, 0, NI_NUMERICHOST) == 0;
  if (fd >= 0) close(fd);
  if (!known) {
    throw_error(ErrorKind::kMissing, "no interface of this host leads to the store at {}:{}", host,
                port);
  }
  return name;
}

}  // namespace

ProcessWorld::ProcessWorld(const Rendezvous& rendezvous, ProcessWorldOptions options)
    : rendezvous_(rendezvous), options_(std::move(options)) {
  // Steps of training issue more calls than NCCL's flight recorder keeps by itself (2,000).
  setenv("TORCH_FR_BUFFER_SIZE", "50000", /*overwrite=*/0);
  // What this machine lacks is said before the others are kept waiting.
  options_.transport == Transport::kGloo ? require_gloo() : require_nccl();
  auto root = connect(rendezvous_, options_.timeout);
  store_ = c10::make_intrusive<c10d::PrefixStore>("shardproof", root);
  compare_fingerprints();
  wait_for_all();
  // A connection of its own: the rank's may be waiting inside a call.
  watchdog_ = std::make_unique<Watchdog>(
      c10::make_intrusive<c10d::PrefixStore>("shardproof", root->clone()), rendezvous_,
      options_.timeout, log_, unfinished_calls());
}

std::function<std::vector<std::string>()> ProcessWorld::unfinished_calls() const {
  if (options_.transport == Transport::kGloo) return {};  // its waits end by themselves
  return nccl_unfinished;
}

std::string ProcessWorld::progress() const {
  std::vector<std::string> lines;
  for (int r = 0; r < world_size(); ++r) lines.push_back(rank_progress(*store_, r));
  return fmt::format("{}", fmt::join(lines, "; "));
}

ProcessWorld::~ProcessWorld() {
  for (auto& [members, backend] : backends_) backend->shutdown();
  backends_.clear();
  watchdog_.reset();
  // Rank 0 serves the store: it goes when all others have said that they need it no more.
  try {
    int64_t gone = store_->add("gone", 1);
    const auto deadline = std::chrono::steady_clock::now() + options_.timeout;
    while (rank() == 0 && gone < world_size() && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(1ms);
      gone = store_->add("gone", 0);
    }
  } catch (const std::exception&) {  // rank 0 has failed: nothing is left to be orderly about
  }
}

void ProcessWorld::wait_for_all() {
  if (store_->add(fmt::format("came/{}", rank()), 1) != 1) {
    bad_input("two processes say that they are rank {} of the world at {}:{}", rank(),
              rendezvous_.host, rendezvous_.port);
  }
  const auto deadline = std::chrono::steady_clock::now() + options_.timeout;
  while (true) {
    if (store_->check({Watchdog::kFailure}))
      bad_input("{}", to_text(store_->get(Watchdog::kFailure)));
    std::vector<int> missing;
    for (int r = 0; r < world_size(); ++r) {
      if (store_->add(fmt::format("came/{}", r), 0) == 0) missing.push_back(r);
    }
    if (missing.empty()) return;
    if (std::chrono::steady_clock::now() > deadline) {
      throw_error(ErrorKind::kMissing, "{} of {} ranks have not come within {:.0f} s: rank {}",
                  missing.size(), world_size(),
                  std::chrono::duration<double>(options_.timeout).count(),
                  fmt::join(missing, ", "));
    }
    std::this_thread::sleep_for(20ms);
  }
}

void ProcessWorld::compare_fingerprints() {
  const std::string mine = fmt::format("{} ranks, {}", world_size(), options_.fingerprint);
  if (rank() == 0) store_->set("fingerprint", mine);
  std::string first;
  try {
    first = to_text(store_->get("fingerprint"));
  } catch (const std::exception&) {
    throw_error(ErrorKind::kMissing, "rank 0 has not come to the store at {}:{} within {:.0f} s",
                rendezvous_.host, rendezvous_.port,
                std::chrono::duration<double>(options_.timeout).count());
  }
  if (first == mine) return;
  const std::string text =
      fmt::format("ranks 0 and {} do not run the same:\n  rank 0: {}\n  rank {}: {}", rank(), first,
                  rank(), mine);
  announce_failure(text);
  bad_input("{}", text);
}

std::vector<FlightRecord> ProcessWorld::flight_records() const {
  if (options_.transport != Transport::kNccl || backends_.empty()) return {};
  return nccl_flight_records(last_flight_);
}

void ProcessWorld::clear_log() {
  for (const FlightRecord& record : flight_records()) {
    last_flight_ = std::max(last_flight_, record.id);
  }
  log_->clear();
}

std::string ProcessWorld::next_key(const char* kind) {
  return fmt::format("{}/{}", kind, messages_++);
}

void ProcessWorld::barrier() {
  const std::string key = next_key("barrier");
  if (store_->add(key, 1) == world_size()) store_->set(key + "/open", "1");
  while (!store_->check({key + "/open"})) std::this_thread::sleep_for(1ms);
}

std::vector<std::string> ProcessWorld::gather(const std::string& mine) {
  const std::string key = next_key("gather");
  const auto of = [&](int r, size_t part) { return fmt::format("{}/{}/{}", key, r, part); };
  for (size_t at = 0, part = 1; at < mine.size(); at += kChunk, ++part) {
    store_->set(of(rank(), part), mine.substr(at, kChunk));
  }
  const size_t parts = (mine.size() + kChunk - 1) / kChunk;
  store_->set(of(rank(), 0), std::to_string(parts));
  std::vector<std::string> all;
  if (rank() != 0) return all;
  for (int r = 0; r < world_size(); ++r) {
    while (!store_->check({of(r, 0)})) std::this_thread::sleep_for(1ms);
    std::string& text = all.emplace_back();
    const size_t count = std::stoul(to_text(store_->get(of(r, 0))));
    for (size_t part = 1; part <= count; ++part) {
      text += to_text(store_->get(of(r, part)));
      store_->deleteKey(of(r, part));
    }
    store_->deleteKey(of(r, 0));
  }
  return all;
}

std::string ProcessWorld::broadcast(const std::string& of_rank_0) {
  const std::string key = next_key("broadcast");
  if (rank() == 0) store_->set(key, of_rank_0);
  while (!store_->check({key})) std::this_thread::sleep_for(1ms);
  return to_text(store_->get(key));
}

void ProcessWorld::announce_failure(const std::string& message) noexcept {
  try {
    if (!store_->check({Watchdog::kFailure})) store_->set(Watchdog::kFailure, message);
  } catch (const std::exception&) {  // rank 0 is gone: the others notice that
  }
}

c10::intrusive_ptr<c10d::Backend> ProcessWorld::make_backend(const std::string& members,
                                                             const std::vector<int>& ranks) {
  const auto store = c10::make_intrusive<c10d::PrefixStore>("group/" + members, store_);
  const auto me = static_cast<int>(std::find(ranks.begin(), ranks.end(), rank()) - ranks.begin());
  const auto size = static_cast<int>(ranks.size());
  if (options_.transport == Transport::kNccl) {
    // The watchdog ends a world whose collectives do not: it knows who is late. c10d's own end
    // writes dumps first and takes a minute; it comes only if ours does not.
    return make_nccl_backend(store, me, size, options_.timeout + 60s, options_.device);
  }
  const bool one_host = rendezvous_.local_size == world_size();
  return make_gloo_backend(store, me, size, options_.timeout,
                           one_host ? "" : address_towards(rendezvous_.host, rendezvous_.port));
}

c10::intrusive_ptr<c10d::Backend> ProcessWorld::create(const std::string& name,
                                                       const std::vector<int>& ranks) {
  const std::string members = fmt::format("{}", fmt::join(ranks, ","));
  auto known = backends_.find(members);
  if (known == backends_.end()) {
    known = backends_.emplace(members, make_backend(members, ranks)).first;
  }
  return c10::make_intrusive<RecordingBackend>(known->second, name, log_, options_.observer);
}

}  // namespace shardproof::comm
