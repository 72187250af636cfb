// One rank's part in one collective, as the rendezvous sees it: SimBackend implements it over
// tensors, the tests over plain vectors.
#pragma once
#include <memory>
#include <mutex>
#include <vector>

namespace shardproof::sim {

// A value that the first member to need it computes for all (the sum of an all-reduce).
struct SharedResult {
  std::mutex mutex;
  std::shared_ptr<void> value;
};

class Part {
 public:
  virtual ~Part() = default;

  // On the owner's thread, before any other rank sees the part: poisons the outputs (what is read
  // before the wait shows) and remembers a checksum of the inputs.
  virtual void begin() = 0;

  // On the owner's thread, inside its wait: fills the owner's outputs from all members' inputs.
  // `members` is in the group's order. Other members may be delivering at the same time, so inputs
  // are only read.
  virtual void deliver(const std::vector<std::shared_ptr<Part>>& members, SharedResult& shared) = 0;

  // On the owner's thread, inside its wait: do the inputs still hold what was posted?
  virtual bool inputs_intact() = 0;

  // The owner's wait is about to return while other members have still to deliver: from now on the
  // owner may reuse its buffers, so the part must own what the others will read. No deliver() of
  // this call runs meanwhile.
  virtual void detach_inputs() = 0;
};

}  // namespace shardproof::sim
