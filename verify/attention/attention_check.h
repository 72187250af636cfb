// Runs one attention case and judges it.
#pragma once
#include <map>
#include <memory>
#include <string>

#include "verify/attention/attention_run.h"

namespace shardproof::verify {

// Simulated worlds by size, kept because threads and their library handles are dear.
class WorldPool {
 public:
  explicit WorldPool(sim::WorldOptions options) : options_(std::move(options)) {}
  sim::World& get(int ranks);
  at::Device device() const { return options_.device; }

 private:
  sim::WorldOptions options_;
  std::map<int, std::unique_ptr<sim::World>> worlds_;
};

// Draws the data (or takes `golden`'s). Never throws for what the subject does wrong: that is the
// result. A combination that cannot be built (kBadInput) is a skip with its reason; any other
// exception is an error, as is a rank that refuses what can be built.
CaseResult check_attention(const AttentionCase& c, const AttentionSubject& subject,
                           WorldPool& worlds, const AttentionGolden* golden = nullptr);

}  // namespace shardproof::verify
