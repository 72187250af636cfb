#include "models/work_sharing.h"

#include <algorithm>

#include "base/error.h"

namespace shardproof::models {
namespace {

using plan::StreamPlacement;

// FLOPs of attention that an accelerator does while it sends a byte, on H200s: 560 TFLOP/s (cuDNN,
// bf16: 21.2 ms for forward and backward at S = 16640, H = 24, D = 128) and 283 GB/s (NCCL
// all-to-all over NVLink), see docs/design.md.
constexpr double kFlopsPerByte = 2000;
constexpr double kUneven = 1.05;  // the slowest rank against the mean

// Rows of a stream that this rank's linear layers see; streams outside the plan are whole on every
// rank.
int64_t rows_of(const plan::AttentionPlan& plan, const std::vector<StreamTokens>& streams,
                const std::string& name, size_t rank) {
  for (const plan::StreamPlan& stream : plan.streams) {
    if (stream.name == name) return stream.local_rows[rank];
  }
  if (name != "joint") return tokens_of(streams, name);
  int64_t rows = 0;
  for (const StreamTokens& stream : streams) rows += rows_of(plan, streams, stream.name, rank);
  return rows;
}

// Products of queries and keys that the rank computes in one attention of one sample, times heads.
double pairs_of_rank(const plan::AttentionPlan& plan, size_t rank) {
  const size_t ulysses = static_cast<size_t>(plan.mesh.ulysses);
  const auto heads = static_cast<double>(plan.heads[rank % ulysses].q.size());
  return static_cast<double>(plan.block_rows(static_cast<int>(rank / ulysses))) *
         static_cast<double>(plan.joint_tokens()) * heads;
}

std::string percent(double part) { return fmt::format("{:.1f} %", 100 * part); }

void warn_of_padding(const WorkSharing& s, std::vector<std::string>& warnings) {
  const plan::AttentionPlan& plan = s.plan;
  int64_t heads = 0, rows = 0, tokens = 0;
  for (const plan::HeadShard& shard : plan.heads) heads += shard.q.size();
  if (heads > plan.q_heads) {
    warnings.push_back(fmt::format(
        "padded heads: {} heads over ulysses{} become {}, {} of the attention is done on zeros",
        plan.q_heads, plan.mesh.ulysses, heads,
        percent(static_cast<double>(heads - plan.q_heads) / static_cast<double>(heads))));
  }
  for (int r = 0; r < plan.sp(); ++r) rows += s.pad_rows(r);
  if (rows > 0) {
    tokens = plan.joint_tokens();
    warnings.push_back(
        fmt::format("padded tokens: {} rows of pads beside {} tokens, {} of all rows", rows, tokens,
                    percent(static_cast<double>(rows) / static_cast<double>(rows + tokens))));
  }
  for (const plan::StreamPlan& stream : plan.streams) {
    if (stream.placement != StreamPlacement::kReplicated || plan.sp() == 1) continue;
    warnings.push_back(
        fmt::format("replicated {}: every rank computes the linear layers of all {} tokens, {} of "
                    "them for others",
                    stream.name, stream.tokens, percent(1 - 1 / static_cast<double>(plan.sp()))));
  }
}

void warn_of_shards(const WorkSharing& s, std::vector<std::string>& warnings) {
  const plan::AttentionPlan& plan = s.plan;
  if (s.slowest() > kUneven * s.mean()) {
    warnings.push_back(fmt::format("uneven shards: the slowest rank computes {} more than the mean",
                                   percent(s.slowest() / s.mean() - 1)));
  }
  for (const plan::StreamPlan& stream : plan.streams) {
    const auto empty = std::count_if(stream.shards.begin(), stream.shards.end(),
                                     [](const plan::Interval& rows) { return rows.size() == 0; });
    if (empty == 0) continue;
    warnings.push_back(fmt::format("few tokens: {} {} token{} over sp {} leave {} rank{} without",
                                   stream.tokens, stream.name, stream.tokens == 1 ? "" : "s",
                                   plan.sp(), empty, empty == 1 ? "" : "s"));
  }
  if (plan.sp() > plan.q_heads) {
    warnings.push_back(
        fmt::format("sp {} is larger than the {} heads: Ulysses has none for every rank, the ring "
                    "must take the rest",
                    plan.sp(), plan.q_heads));
  }
}

void warn_of_traffic(const WorkSharing& s, double attention_flops,
                     std::vector<std::string>& warnings) {
  const plan::AttentionPlan& plan = s.plan;
  int64_t shortest = plan.block_rows(0);
  for (int r = 1; r < plan.mesh.ring; ++r) shortest = std::min(shortest, plan.block_rows(r));
  // A step of the ring does 4 rows x rows FLOPs and sends 4 x rows bytes, both x heads x head_dim.
  if (plan.mesh.ring > 1 && plan.ring_mode == plan::RingMode::kRotate &&
      static_cast<double>(shortest) < kFlopsPerByte) {
    warnings.push_back(fmt::format(
        "short ring blocks: {} tokens; below about {} a step (on H200s with NVLink) ends before "
        "the next block has come",
        shortest, kFlopsPerByte));
  }
  int64_t sent = 0;
  for (const RankShare& rank : s.ranks) sent = std::max(sent, rank.traffic.forward);
  const double per_byte = sent > 0 ? attention_flops / static_cast<double>(sent) : kFlopsPerByte;
  if (per_byte < kFlopsPerByte) {
    warnings.push_back(
        fmt::format("communication: attention computes {:.0f} FLOPs for each byte that it sends; "
                    "below about {} (on H200s with NVLink) sending takes longer",
                    per_byte, kFlopsPerByte));
  }
}

}  // namespace

AttentionTraffic attention_traffic(const plan::AttentionPlan& plan, int sp_rank, int64_t samples,
                                   int64_t head_dim) {
  constexpr int64_t kHalf = 2, kWide = 4;  // bytes
  const int ulysses = plan.mesh.ulysses, ring = plan.mesh.ring;
  const int u = sp_rank % ulysses, r = sp_rank / ulysses;
  const plan::HeadShard& mine = plan.heads[static_cast<size_t>(u)];
  const int64_t rows = plan.shard_rows(sp_rank), pair = 2 * mine.kv.size();
  int64_t there = 0, back = 0, both = 0, wide = 0;  // elements; `both`: in forward and backward
  for (int other = 0; other < ulysses; ++other) {
    if (other == u) continue;
    const plan::HeadShard& heads = plan.heads[static_cast<size_t>(other)];
    const int64_t theirs = plan.shard_rows(r * ulysses + other);
    there += rows * (heads.q.size() + 2 * heads.kv.size()) + theirs * mine.q.size();
    back += rows * heads.q.size() + theirs * (mine.q.size() + pair);
  }
  if (plan.ring_mode == plan::RingMode::kRotate) {
    // K, V of every block but the next rank's, then the gradients of every block.
    for (int step = 0; step < ring && ring > 1; ++step) {
      const int64_t block = plan.block_rows((r - step + ring) % ring) * pair;
      both += step + 1 < ring ? block : 0;
      wide += block;
    }
  } else {
    int64_t largest = 0;
    for (int i = 0; i < ring; ++i) largest = std::max(largest, plan.block_rows(i));
    both += (ring - 1) * largest * pair;
    wide += (ring - 1) * largest * pair;
  }
  for (const plan::StreamPlan& stream : plan.streams) {
    if (stream.placement != StreamPlacement::kReplicated) continue;
    const int64_t gathered = (plan.sp() - 1) * stream.shards[0].size() * plan.q_heads;
    there += gathered;
    wide += gathered;
  }
  const int64_t each = samples * head_dim;
  return {(there + both) * kHalf * each, (back + both) * kHalf * each + wide * kWide * each};
}

double WorkSharing::slowest() const {
  double most = 0;
  for (const RankShare& rank : ranks) most = std::max(most, rank.flops);
  return most;
}

double WorkSharing::total() const {
  double sum = 0;
  for (const RankShare& rank : ranks) sum += rank.flops;
  return sum;
}

double WorkSharing::mean() const { return total() / static_cast<double>(ranks.size()); }

int64_t WorkSharing::pad_rows(int sp_rank) const {
  int64_t pads = 0;
  for (const plan::StreamPlan& stream : plan.streams) {
    if (stream.placement == StreamPlacement::kReplicated) continue;
    const auto r = static_cast<size_t>(sp_rank);
    pads += stream.local_rows[r] - stream.shards[r].size();
  }
  return pads;
}

int64_t WorkSharing::padded_heads(int sp_rank) const {
  const plan::Interval heads = ranks[static_cast<size_t>(sp_rank)].heads;
  return std::clamp<int64_t>(heads.end - plan.q_heads, 0, heads.size());
}

namespace {

// One replica's sample and how its attentions are planned.
struct Sharers {
  const Transformer& model;
  const std::vector<StreamTokens>& streams;
  std::vector<AttentionUse> uses;
  std::vector<plan::AttentionPlan> plans;  // of the uses; of the first where there is none
  std::vector<LinearWork> linears;
};

double attention_flops(const Sharers& s, size_t use, size_t rank) {
  const Geometry g = s.model.geometry();
  double pairs = 0;
  if (s.uses[use].cross()) {
    double queries = 0, keys = 0;
    for (const auto& q : s.uses[use].queries) {
      queries += static_cast<double>(rows_of(s.plans[0], s.streams, q, rank));
    }
    for (const auto& k : s.uses[use].keys) keys += static_cast<double>(tokens_of(s.streams, k));
    pairs = queries * keys * static_cast<double>(g.heads);
  } else {
    pairs = pairs_of_rank(s.plans[use], rank);
  }
  return 4 * pairs * static_cast<double>(g.head_dim);
}

RankShare share_of_rank(const Sharers& s, size_t r, int64_t samples) {
  const plan::AttentionPlan& plan = s.plans[0];
  RankShare rank;
  for (const plan::StreamPlan& stream : plan.streams) {
    rank.tokens.push_back(stream.shards[r].size());
    rank.rows.push_back(stream.local_rows[r]);
  }
  rank.heads = plan.heads[r % static_cast<size_t>(plan.mesh.ulysses)].q;
  for (const LinearWork& linear : s.linears) {
    const int64_t rows = linear.stream.empty() ? 1 : rows_of(plan, s.streams, linear.stream, r);
    rank.flops += static_cast<double>(rows) * linear.flops_per_row;
  }
  for (size_t i = 0; i < s.uses.size(); ++i) {
    rank.flops += attention_flops(s, i, r) * static_cast<double>(s.uses[i].layers);
  }
  rank.flops *= static_cast<double>(samples);
  rank.traffic = attention_traffic(plan, static_cast<int>(r), samples, s.model.geometry().head_dim);
  return rank;
}

}  // namespace

WorkSharing share_work(const Transformer& model, const SampleSize& size, int64_t samples,
                       const comm::MeshShape& mesh, const ParallelOptions& options) {
  WorkSharing result;
  result.work = count_work(model, size, samples);
  Sharers s{model, result.work.streams, model.attentions(), {}, linear_work(model)};
  SP_CHECK(!s.uses.empty() && !s.uses[0].cross(), "{}: expected self-attention first",
           model.class_name());
  for (const AttentionUse& use : s.uses) {
    std::vector<std::pair<std::string, int64_t>> queries;
    for (const std::string& name : (use.cross() ? s.uses[0] : use).queries) {
      queries.emplace_back(name, tokens_of(s.streams, name));
    }
    s.plans.push_back(plan_attention(mesh, options, queries, model.geometry().heads));
  }
  result.plan = s.plans[0];
  result.layers = s.uses[0].layers;
  double busiest = 0;  // FLOPs of one attention
  for (size_t r = 0; r < static_cast<size_t>(mesh.sp()); ++r) {
    result.ranks.push_back(share_of_rank(s, r, samples));
    busiest = std::max(busiest, attention_flops(s, 0, r) * static_cast<double>(samples));
  }
  warn_of_padding(result, result.warnings);
  warn_of_shards(result, result.warnings);
  warn_of_traffic(result, busiest, result.warnings);
  return result;
}

}  // namespace shardproof::models
