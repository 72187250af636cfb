// What the ranks of a planted case compute and say to each other, without a judgement.
#pragma once
#include <ATen/core/Tensor.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "verify/mutants/mutant.h"
#include "verify/rank_world.h"

namespace shardproof::verify {

using Traffic = std::vector<std::vector<CollectiveCall>>;  // by rank

struct BareRun {
  bool completed = false;
  // All that a check of the case judges, put together from the ranks.
  std::map<std::string, at::Tensor> tensors;
  Traffic calls;
};

// Errors: what the case's parts throw, a rank that fails among them.
BareRun run_bare(const Plant& plant, Worlds& worlds);

// The same tensors to the byte, and the same calls: no check that sees results and traffic can
// tell one from the other. `vanishing`: tensors that are not looked at.
bool same(const BareRun& a, const BareRun& b, const std::set<std::string>& vanishing = {});

// How far a tensor of `b` is from that of `a`, in relative L2.
struct Distance {
  std::string name;  // empty: all are equal
  double relative = 0;
};
Distance farthest(const BareRun& a, const BareRun& b, const std::set<std::string>& vanishing = {});

}  // namespace shardproof::verify
