// A world whose ranks are processes, each with one device: they meet in a store at rank 0's host,
// make a c10d backend a group, and end together when one of them fails.
#pragma once
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/nccl_backend.h"
#include "comm/recording_backend.h"
#include "comm/rendezvous.h"
#include "comm/watchdog.h"

namespace shardproof::comm {

enum class Transport { kGloo, kNccl };

struct ProcessWorldOptions {
  Transport transport = Transport::kGloo;
  at::Device device = at::kCPU;
  // Of one collective, and of a rank that no longer answers.
  std::chrono::milliseconds timeout = std::chrono::seconds(30);
  // What must be the same on all ranks: the program and its arguments.
  std::string fingerprint;
  std::shared_ptr<CallObserver> observer;  // of every call of this rank; may be null
};

class ProcessWorld final : public BackendFactory {
 public:
  // Collective over all processes. Errors: kBadInput if the ranks' fingerprints differ (both are
  // shown) or a rank is there twice; kMissing if the store cannot be reached or served (port in
  // use), or if not all ranks have come within the timeout (those that are missing are named).
  ProcessWorld(const Rendezvous& rendezvous, ProcessWorldOptions options);
  ~ProcessWorld() override;

  int rank() const override { return rendezvous_.rank; }
  int world_size() const override { return rendezvous_.world_size; }
  at::Device device() const override { return options_.device; }
  // Backends of groups that were made before are used again; their calls are recorded.
  c10::intrusive_ptr<c10d::Backend> create(const std::string& name,
                                           const std::vector<int>& ranks) override;

  // The calls of this rank since they were last cleared.
  const CallLog& log() const { return *log_; }

  // The backend's own records of the collectives since log() was last cleared by clear_log(); empty
  // where the backend keeps none (Gloo).
  std::vector<FlightRecord> flight_records() const;
  bool keeps_flight_records() const { return options_.transport == Transport::kNccl; }
  void clear_log();

  // Control messages through the store; they wait without limit, as long as all ranks live.
  void barrier();
  // By rank, on rank 0; empty elsewhere.
  std::vector<std::string> gather(const std::string& mine);
  // Rank 0's, everywhere.
  std::string broadcast(const std::string& of_rank_0);

  // How far each rank was a moment ago, for messages.
  std::string progress() const;

  // Tells all others that this rank has failed; they print it and end with exit code 4.
  void announce_failure(const std::string& message) noexcept;

 private:
  c10::intrusive_ptr<c10d::Backend> make_backend(const std::string& members,
                                                 const std::vector<int>& ranks);
  std::function<std::vector<std::string>()> unfinished_calls() const;
  void compare_fingerprints();
  void wait_for_all();
  std::string next_key(const char* kind);

  Rendezvous rendezvous_;
  ProcessWorldOptions options_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::unique_ptr<Watchdog> watchdog_;
  std::shared_ptr<CallLog> log_ = std::make_shared<CallLog>();
  std::map<std::string, c10::intrusive_ptr<c10d::Backend>> backends_;
  int64_t messages_ = 0;
  int64_t last_flight_ = -1;  // the last record before the log was cleared
};

}  // namespace shardproof::comm
