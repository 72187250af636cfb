// Number and elements of FSDP's collectives in a training case, from its parameters alone.
#include <ATen/ATen.h>

#include "base/error.h"
#include "verify/training/training_run.h"

namespace shardproof::verify {
namespace {

struct Traffic {
  int64_t calls = 0;
  int64_t elements = 0;  // that a rank sends
  bool operator==(const Traffic&) const = default;
};
// By group and kind: "fsdp all_gather".
using TrafficTable = std::map<std::string, Traffic>;

std::string key_of(const std::string& group, CallKind kind) {
  return group + " " + to_string(kind);
}

// What each parameter adds in one step.
class Expected {
 public:
  Expected(const TrainingCase& c, const TrainingData& data) : c_(c), policy_(c.policy()) {
    const auto blocks = models::block_names(*data.model);
    const int64_t micro = c.accumulation;
    const auto passes = static_cast<int64_t>(data.batches[0][0].passes.size());
    const int64_t synchronized = c.deferred ? 1 : micro;
    for (const models::ParameterSpec& spec : data.parameters.specs()) {
      const bool block = std::any_of(blocks.begin(), blocks.end(), [&](const std::string& name) {
        return spec.name.starts_with(name + ".");
      });
      // A block is gathered for each forward and each backward; one that stays whole is there for
      // the last pass's backward and gathered for those of the others. The root: once.
      const int64_t gathers = !block ? micro : micro * passes * (c.keep ? 1 : 2);
      const int64_t reductions = block ? synchronized * passes : synchronized;
      add(spec, c.steps * gathers, c.steps * reductions);
    }
    // The loss that is reported, the norm, and the count of valid elements.
    table_[key_of("world", CallKind::kAllReduce)].calls += c.steps;
    table_[key_of("world", CallKind::kAllReduce)].elements += c.steps;
    if (c.shards > 1) {
      table_[key_of("fsdp", CallKind::kAllReduce)].calls += c.steps;
      table_[key_of("fsdp", CallKind::kAllReduce)].elements += c.steps;
    }
  }
  const TrafficTable& table() const { return table_; }

 private:
  void add(const models::ParameterSpec& spec, int64_t gathers, int64_t reductions) {
    const bool whole =
        c_.shards == 1 || spec.buffer || (policy_.replicated && policy_.replicated(spec.name));
    const bool trained = !spec.buffer && !spec.frozen;
    const int64_t rows = spec.shape.empty() ? 1 : spec.shape[0];
    const int64_t per_row = c10::multiply_integers(spec.shape) / rows;
    const int64_t chunk = (rows + c_.shards - 1) / c_.shards * per_row;
    const auto count = [&](const char* group, CallKind kind, int64_t calls, int64_t elements) {
      Traffic& traffic = table_[key_of(group, kind)];
      traffic.calls += calls;
      traffic.elements += calls * elements;
    };
    if (whole && trained && c_.model.mesh.world() > 1) {
      count("world", CallKind::kAllReduce, reductions, rows * per_row);
    }
    if (whole) return;
    if (c_.shards > 1) count("fsdp", CallKind::kAllGather, gathers, chunk);
    if (!trained) return;
    if (c_.shards > 1) count("fsdp", CallKind::kReduceScatter, reductions, c_.shards * chunk);
    if (c_.shards < c_.model.mesh.world()) {
      count("replicate", CallKind::kAllReduce, reductions, chunk);
    }
  }

  const TrainingCase& c_;
  fsdp::Policy policy_;
  TrafficTable table_;
};

TrafficTable counted(const std::vector<CollectiveCall>& calls) {
  TrafficTable table;
  for (const CollectiveCall& call : calls) {
    if (call.group != "fsdp" && call.group != "replicate" && call.group != "world") continue;
    Traffic& traffic = table[key_of(call.group, call.kind)];
    ++traffic.calls;
    for (const int64_t elements : call.send) traffic.elements += elements;
  }
  return table;
}

// Calls of FSDP without their numbers, for comparison between ranks.
std::vector<std::string> order_of(const std::vector<CollectiveCall>& calls) {
  std::vector<std::string> order;
  for (const CollectiveCall& call : calls) {
    if (call.group == "fsdp") order.push_back(call.tag + " " + call.describe());
  }
  return order;
}

}  // namespace

CheckResult check_training_trace(const TrainingCase& c, const TrainingData& data,
                                 const RankWorld& world) {
  const Expected expected(c, data);
  for (int rank = 0; rank < world.size(); ++rank) {
    const TrafficTable table = counted(world.calls(rank));
    for (const auto& [key, traffic] : expected.table()) {
      const auto it = table.find(key);
      const Traffic got = it == table.end() ? Traffic{} : it->second;
      if (got == traffic) continue;
      return {"trace", Status::kFail,
              fmt::format("rank {}: {} calls of {} that send {} elements; expected {} and {}", rank,
                          got.calls, key, got.elements, traffic.calls, traffic.elements)};
    }
    if (table.size() != expected.table().size()) {
      return {"trace", Status::kFail, fmt::format("rank {}: calls of another kind", rank)};
    }
    if (order_of(world.calls(rank)) != order_of(world.calls(0))) {
      return {"trace", Status::kFail,
              fmt::format("ranks 0 and {} gather and reduce in another order", rank)};
    }
  }
  return {"trace", Status::kPass, {}};
}

}  // namespace shardproof::verify
