// Description of one collective call of one rank: what is recorded of a run, what the simulator
// matches between ranks, and what errors print. Plain values, no LibTorch.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace shardproof {

enum class CallKind {
  kAllToAll,
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kBroadcast,
  kSend,
  kRecv,
  kBarrier,
};
const char* to_string(CallKind kind);

struct CollectiveCall {
  std::string group;   // name of the communicator's group, "ulysses"
  int64_t number = 0;  // k-th call of this rank in this group; send and recv: per peer pair
  CallKind kind = CallKind::kBarrier;
  std::string tag;               // module path plus site; adjoints end in '
  std::string dtype;             // "Float", "BFloat16", ... as c10 spells it
  std::vector<int64_t> send;     // elements sent to each member of the group (one entry if the same
                                 // buffer goes to all); send: one entry
  std::vector<int64_t> receive;  // elements received from each member; recv: one entry
  int root = -1;                 // broadcast
  int peer = -1;                 // send, recv: the other rank's index in the group
  std::string reduce_op;         // "sum", "avg", ...; empty where nothing is reduced

  // "all_to_all Float send=[8,8] receive=[8,8]"
  std::string describe() const;
  // One JSON object on one line (rank<r>.jsonl of a capture, see docs/formats.md).
  std::string to_json_line() const;

  bool operator==(const CollectiveCall&) const = default;
};

// Why the two calls cannot be parts of the same collective; empty if they can. `mine` and `theirs`
// are the members' indices in the group. Send sizes of one must be receive sizes of the other.
std::string mismatch(const CollectiveCall& a, int a_index, const CollectiveCall& b, int b_index);

}  // namespace shardproof
