#include "base/error.h"
#include "verify/models/model_run.h"

namespace shardproof::verify {
namespace {

// The collectives of one block on one rank, by pass of the program.
struct BlockCalls {
  std::vector<std::string> forward, recomputed;
  size_t adjoint = 0;
};

// "transformer_blocks.3/attn/..." -> "transformer_blocks.3"; "" outside of blocks.
std::string block_of(const std::string& tag) {
  const std::string first = tag.substr(0, tag.find('/'));
  return first.find("blocks.") == std::string::npos ? std::string() : first;
}

std::string line_of(const CollectiveCall& call, const std::string& tag) {
  CollectiveCall plain = call;
  plain.tag = tag;
  plain.number = 0;
  return plain.to_json_line();
}

std::map<std::string, BlockCalls> calls_by_block(const std::vector<CollectiveCall>& calls) {
  std::map<std::string, BlockCalls> blocks;
  for (const CollectiveCall& call : calls) {
    const std::string block = block_of(call.tag);
    if (block.empty()) continue;
    const bool again = call.tag.ends_with('~');
    if (call.tag.ends_with('\'')) {
      ++blocks[block].adjoint;
    } else if (again) {
      blocks[block].recomputed.push_back(line_of(call, call.tag.substr(0, call.tag.size() - 1)));
    } else {
      blocks[block].forward.push_back(line_of(call, call.tag));
    }
  }
  return blocks;
}

std::string problem_of(const ModelCase& c, int rank, const std::vector<CollectiveCall>& calls) {
  const auto blocks = calls_by_block(calls);
  if (c.mesh.sp() > 1 && blocks.empty()) return fmt::format("rank {}: no block talks", rank);
  for (const auto& [name, block] : blocks) {
    if (block.forward.empty() || block.adjoint == 0) {
      return fmt::format("rank {}: {} has {} collectives in forward and {} in backward", rank, name,
                         block.forward.size(), block.adjoint);
    }
    if (!c.recompute && !block.recomputed.empty()) {
      return fmt::format("rank {}: {} is recomputed without having been asked for", rank, name);
    }
    if (c.recompute && block.recomputed != block.forward) {
      return fmt::format(
          "rank {}: recomputing {} issues {} collectives that are not the forward's {} in order",
          rank, name, block.recomputed.size(), block.forward.size());
    }
  }
  return {};
}

}  // namespace

CheckResult check_model_trace(const ModelCase& c, const RankWorld& world) {
  for (int r = 0; r < world.size(); ++r) {
    const std::string problem = problem_of(c, r, world.calls(r));
    if (!problem.empty()) return {"trace", Status::kFail, problem};
  }
  return {"trace", Status::kPass, {}};
}

}  // namespace shardproof::verify
