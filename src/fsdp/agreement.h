// One outcome for all ranks of a group: what fails on one of them fails on every one, with the same
// error. Without it the others would wait in their next collective for a rank that has gone.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "comm/communicator.h"

namespace shardproof::fsdp {

// All functions are collective over the group.
class Agreement {
 public:
  // `device`: of which the group moves tensors (CUDA for NCCL).
  Agreement(const comm::Communicator& group, at::Device device) : group_(group), device_(device) {}

  // The numbers of all ranks, by rank; as many on each.
  std::vector<std::vector<int64_t>> gather(const std::vector<int64_t>& numbers) const;
  std::vector<std::string> gather(const std::string& text) const;  // by rank
  // Empty where all ranks have the same text, else the texts by rank. Moves them only then.
  std::vector<std::string> gather_if_different(const std::string& text) const;

  // Runs `action`, which must not communicate. What it throws on any rank comes back on all: the
  // texts of all ranks that failed, with their numbers unless all say the same; the kind is the
  // first such rank's. An exception that is no Error counts as kInternal.
  std::optional<Error> attempt(const std::function<void()>& action) const;

 private:
  at::Tensor gather_rows(const at::Tensor& mine, const std::vector<int64_t>& rows) const;

  const comm::Communicator& group_;
  at::Device device_;
};

}  // namespace shardproof::fsdp
