#include "verify/rng_check.h"

#include "base/error.h"

namespace shardproof::verify {

CheckResult check_rng(const comm::MeshShape& mesh, const std::vector<uint64_t>& fingerprints) {
  SP_CHECK(fingerprints.size() == static_cast<size_t>(mesh.world()), "{} fingerprints for {}",
           fingerprints.size(), mesh.to_string());
  const auto of = [&](int dp, int sp) {
    return fingerprints[static_cast<size_t>(dp) * static_cast<size_t>(mesh.sp()) +
                        static_cast<size_t>(sp)];
  };
  for (int dp = 0; dp < mesh.dp; ++dp) {
    for (int sp = 1; sp < mesh.sp(); ++sp) {
      if (of(dp, sp) == of(dp, 0)) continue;
      return {"rng", Status::kFail,
              fmt::format("ranks {} and {} of one replica have drawn different random numbers",
                          dp * mesh.sp(), dp * mesh.sp() + sp)};
    }
    for (int other = 0; other < dp; ++other) {
      if (of(dp, 0) != of(other, 0)) continue;
      return {"rng", Status::kFail,
              fmt::format("replicas {} and {} draw the same random numbers", other, dp)};
    }
  }
  return {"rng", Status::kPass, {}};
}

}  // namespace shardproof::verify
