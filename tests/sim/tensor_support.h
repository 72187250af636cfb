// What tests over tensors share. Ranks' threads report by throwing: Catch's assertions belong to
// the main thread.
#pragma once
#include <ATen/ATen.h>

#include <string>

#include "comm/communicator.h"
#include "sim/world.h"
#include "tests/sim/engine/violation.h"

namespace shardproof::tests {

// Same shape, dtype and bytes but for the NaNs' payloads.
inline bool same(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  if (!at::isFloatingType(a.scalar_type())) return at::equal(a, b);
  return at::equal(a.isnan(), b.isnan()) && at::equal(a.nan_to_num(0), b.nan_to_num(0));
}

inline void expect_same(const at::Tensor& got, const at::Tensor& want, const std::string& what) {
  if (same(got, want)) return;
  expect(false, fmt::format("{}: {} {}, got {} {}", what, c10::toString(want.scalar_type()),
                            c10::str(want), c10::toString(got.scalar_type()), c10::str(got)));
}

inline bool all_nan(const at::Tensor& x) { return x.isnan().all().item<bool>(); }

inline std::vector<int> world_ranks(int n) {
  std::vector<int> ranks;
  for (int r = 0; r < n; ++r) ranks.push_back(r);
  return ranks;
}

// The group of `ranks` that this rank is in.
inline comm::Communicator group_of(sim::RankContext& rank, const std::string& name,
                                   const std::vector<int>& ranks) {
  if (ranks.size() == 1) return comm::Communicator();
  return comm::Communicator(rank.create(name, ranks), name, ranks);
}

// The group of all ranks of the world.
inline comm::Communicator whole_world(sim::RankContext& rank, const std::string& name = "world") {
  return group_of(rank, name, world_ranks(rank.world_size()));
}

}  // namespace shardproof::tests
