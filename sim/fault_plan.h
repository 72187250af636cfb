// Faults that the simulator plants in collectives: what real bugs and real networks do.
#pragma once
#include <c10/core/ScalarType.h>

#include <map>
#include <string>
#include <vector>

namespace shardproof::sim {

enum class FaultKind {
  kScale,        // the result is multiplied by `factor`
  kDrop,         // nothing arrives: the result is zeros
  kRotatePeers,  // what member i should deliver comes from member i + `shift` (wrong group, order)
  kRound,        // the result passes through `dtype`
  kStale,        // the result of the previous call with this tag arrives again
  kEcho,         // a receive yields what this rank itself sent last
  kLocal,        // the result of an all-reduce is the rank's own input: nothing was reduced
  kOmit,         // the rank does not make the call; its outputs stay unwritten
  kReuse,        // the input is overwritten as soon as the call is issued
  kSkipWait,     // the wait returns at once; the result never arrives (the run ends as unwaited)
  kHoldBack,     // the call is issued after the rank's next one in this group, or in its own wait
  kDelay,        // the rank lets all others run first
  kKill,         // the rank throws instead of making the call
  kHang          // the rank computes for ever instead of making the call; on real ranks only
};

struct Fault {
  FaultKind kind = FaultKind::kScale;
  std::string tag = "*";    // shell pattern on the call's tag
  int rank = -1;            // world rank, -1: all
  int64_t occurrence = -1;  // only the n-th matching call of the rank (from 0), -1: all
  double factor = 1;
  int shift = 1;
  c10::ScalarType dtype = c10::ScalarType::BFloat16;
};

using FaultPlan = std::vector<Fault>;

const char* fault_name(FaultKind kind);  // "scale", "skip-wait", ...

// KIND[,rank=N][,call=N][,tag=PATTERN][,factor=X][,shift=N][,dtype=NAME], as in
// "scale,factor=0.9,tag=*dkv.rotate*,rank=1". Errors (kBadInput): what cannot be read.
Fault parse_fault(const std::string& text);

// Finds the fault of a call; counts matching calls of one rank.
class FaultMatcher {
 public:
  FaultMatcher() = default;
  FaultMatcher(const FaultPlan& plan, int rank);
  // The first fault of the plan that applies to this call, or nullptr.
  const Fault* match(const std::string& tag);

 private:
  std::vector<Fault> faults_;
  std::vector<int64_t> seen_;
};

}  // namespace shardproof::sim
