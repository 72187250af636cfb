#include "verify/matched/matched_attention.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "attention/merge.h"
#include "base/error.h"
#include "verify/attention/ownership.h"

namespace shardproof::verify {

using at::Tensor;
using attention::AttentionGradients;
using attention::AttentionOutput;
using plan::RingMode;
using plan::StreamPlacement;
using Values = Lockstep::Values;

namespace {

enum State { kQ, kK, kV, kOut, kLse, kStates };

double scale_of(const Tensor& q) { return 1 / std::sqrt(static_cast<double>(q.size(-1))); }

// In rank order.
Tensor sum(const std::vector<Tensor>& parts) {
  Tensor total = parts[0];
  for (size_t i = 1; i < parts.size(); ++i) total = total + parts[i];
  return total;
}

std::vector<int64_t> row_counts(const std::vector<Tensor>& blocks) {
  std::vector<int64_t> counts;
  for (const Tensor& block : blocks) counts.push_back(block.size(1));
  return counts;
}

}  // namespace

plan::AttentionPlan count_chunks(const AttentionCase& c,
                                 const std::vector<std::pair<std::string, int64_t>>& streams) {
  const Ownership owned = derive_ownership(c);
  plan::AttentionPlan chunks;
  chunks.mesh = c.mesh;
  chunks.q_heads = chunks.kv_heads = c.heads;
  chunks.ring_mode = c.ring_mode;
  for (const auto& [name, tokens] : streams) {
    const bool text = name == "text";
    plan::StreamPlan stream{name,
                            tokens,
                            text ? c.text_placement : StreamPlacement::kSharded,
                            {},
                            text ? owned.text_rows : owned.image_rows};
    for (int r = 0; r < c.mesh.sp(); ++r) {
      plan::Interval& rows = stream.shards.emplace_back();
      int64_t token = 0;
      for (const TokenHome& home : text ? owned.text : owned.image) {
        if (home.sp_rank < r) rows.begin = token + 1;
        if (home.sp_rank <= r) rows.end = token + 1;
        ++token;
      }
    }
    chunks.streams.push_back(std::move(stream));
  }
  for (size_t u = 0; u < owned.heads.size(); ++u) {
    const int64_t begin = owned.heads[u].empty() ? c.heads : owned.heads[u].front();
    const plan::Interval heads{begin, begin + owned.head_slots[u]};
    chunks.heads.push_back({heads, heads, {}});
  }
  return chunks;
}

MatchedAttention::MatchedAttention(plan::AttentionPlan chunks,
                                   std::shared_ptr<const attention::LocalAttention> local)
    : chunks_(std::move(chunks)), local_(std::move(local)) {}

Tensor MatchedAttention::own_rows(const Tensor& x, size_t stream, size_t chunk) const {
  const plan::Interval rows = shard(stream, chunk);
  return x.narrow(1, replicated(stream) ? rows.begin : 0, rows.size());
}

Tensor MatchedAttention::put_back(const Tensor& own, size_t stream, size_t chunk) const {
  auto shape = own.sizes().vec();
  shape[1] = chunks_.streams[stream].local_rows[chunk];
  Tensor all = at::zeros(shape, own.options());
  own_rows(all, stream, chunk).copy_(own);
  return all;
}

std::vector<Tensor> MatchedAttention::blocks(const std::vector<std::vector<Tensor>>& rows) const {
  std::vector<Tensor> result;
  for (int block = 0; block < ring(); ++block) {
    std::vector<Tensor> parts;
    for (int member = 0; member < ulysses(); ++member) {
      for (const Tensor& x : rows[chunk(block, member)]) parts.push_back(x.transpose(0, 1));
    }
    result.push_back(at::cat(parts, 0).transpose(0, 1));
  }
  return result;
}

std::vector<Tensor> MatchedAttention::block_masks(const Tensor& key_mask) const {
  std::vector<Tensor> masks(static_cast<size_t>(ring()));
  if (!key_mask.defined()) return masks;
  for (int block = 0; block < ring(); ++block) {
    std::vector<Tensor> parts;
    for (int member = 0; member < ulysses(); ++member) {
      int64_t offset = 0;
      for (const plan::StreamPlan& stream : chunks_.streams) {
        const plan::Interval rows = stream.shards[chunk(block, member)];
        parts.push_back(key_mask.narrow(1, offset + rows.begin, rows.size()));
        offset += stream.tokens;
      }
    }
    masks[static_cast<size_t>(block)] = at::cat(parts, 1);
  }
  return masks;
}

Tensor MatchedAttention::heads_of(const Tensor& x, int member) const {
  const plan::Interval heads = chunks_.heads[static_cast<size_t>(member)].q;
  const int64_t real = std::clamp<int64_t>(x.size(2) - heads.begin, 0, heads.size());
  const Tensor own = x.narrow(2, std::min(heads.begin, x.size(2)), real);
  if (real == heads.size()) return own;
  auto shape = x.sizes().vec();
  shape[2] = heads.size() - real;
  return at::cat({own, at::zeros(shape, x.options())}, 2);
}

Tensor MatchedAttention::rows_of_chunk(const std::vector<Tensor>& by_member, int block,
                                       int member) const {
  const auto rows_of = [&](int m) {
    int64_t rows = 0;
    for (size_t s = 0; s < streams(); ++s) rows += shard(s, chunk(block, m)).size();
    return rows;
  };
  int64_t begin = 0;
  for (int m = 0; m < member; ++m) begin += rows_of(m);
  std::vector<Tensor> heads;
  for (const Tensor& x : by_member) heads.push_back(x.narrow(1, begin, rows_of(member)));
  return at::cat(heads, 2).narrow(2, 0, chunks_.q_heads);
}

std::vector<Tensor> MatchedAttention::cut_streams(const Tensor& rows, size_t chunk) const {
  std::vector<Tensor> result;
  int64_t begin = 0;
  for (size_t s = 0; s < streams(); ++s) {
    result.push_back(rows.narrow(1, begin, shard(s, chunk).size()));
    begin += shard(s, chunk).size();
  }
  return result;
}

AttentionOutput MatchedAttention::forward_block(int block, const std::vector<Tensor>& q,
                                                const std::vector<Tensor>& k,
                                                const std::vector<Tensor>& v,
                                                const std::vector<Tensor>& masks,
                                                double scale) const {
  const Tensor& queries = q[static_cast<size_t>(block)];
  if (ring() == 1) return local_->forward(queries, k[0], v[0], masks[0], scale);
  if (chunks_.ring_mode == RingMode::kAllGather) {
    return local_->forward(queries, at::cat(k, 1), at::cat(v, 1),
                           masks[0].defined() ? at::cat(masks, 1) : Tensor(), scale);
  }
  // Blocks come around against the ring, the own one first.
  attention::PartialAttention so_far;
  for (int step = 0; step < ring(); ++step) {
    const auto from = static_cast<size_t>((block - step + ring()) % ring());
    so_far = attention::merge_block(so_far,
                                    local_->forward(queries, k[from], v[from], masks[from], scale));
  }
  return {so_far.out.to(queries.scalar_type()), so_far.lse};
}

std::vector<Values> MatchedAttention::forward(const std::vector<Values>& chunks,
                                              const Tensor& key_mask) const {
  std::vector<std::vector<Tensor>> rows[3];
  for (size_t part = 0; part < 3; ++part) {
    for (size_t c = 0; c < chunks.size(); ++c) {
      auto& of_chunk = rows[part].emplace_back();
      int64_t offset = 0;
      for (size_t s = 0; s < streams(); ++s) {
        Tensor x = own_rows(chunks[c][3 * s + part], s, c);
        if (part != kQ && key_mask.defined()) {  // 0 * NaN is NaN
          const Tensor mask = key_mask.narrow(1, offset + shard(s, c).begin, shard(s, c).size());
          x = x.masked_fill(mask.logical_not().unsqueeze(-1).unsqueeze(-1), 0);
        }
        offset += chunks_.streams[s].tokens;
        of_chunk.push_back(x);
      }
    }
  }
  const std::vector<Tensor> q = blocks(rows[0]), k = blocks(rows[1]), v = blocks(rows[2]);
  const std::vector<Tensor> masks = block_masks(key_mask);
  const double scale = scale_of(q[0]);

  std::vector<Values> states(chunks.size());
  std::vector<std::vector<Tensor>> outputs(static_cast<size_t>(ring()));
  for (int member = 0; member < ulysses(); ++member) {
    std::vector<Tensor> own[3];
    for (int block = 0; block < ring(); ++block) {
      const auto b = static_cast<size_t>(block);
      own[0].push_back(heads_of(q[b], member));
      own[1].push_back(heads_of(k[b], member));
      own[2].push_back(heads_of(v[b], member));
    }
    for (int block = 0; block < ring(); ++block) {
      const auto b = static_cast<size_t>(block);
      const AttentionOutput out = forward_block(block, own[0], own[1], own[2], masks, scale);
      outputs[b].push_back(out.out);
      states[chunk(block, member)] = {own[0][b], own[1][b], own[2][b], out.out, out.lse};
    }
  }

  std::vector<std::vector<Tensor>> by_stream(streams());  // of all chunks
  for (int block = 0; block < ring(); ++block) {
    for (int member = 0; member < ulysses(); ++member) {
      const Tensor out = rows_of_chunk(outputs[static_cast<size_t>(block)], block, member);
      const auto cut = cut_streams(out, chunk(block, member));
      for (size_t s = 0; s < streams(); ++s) by_stream[s].push_back(cut[s]);
    }
  }
  std::vector<Values> results;
  for (size_t c = 0; c < chunks.size(); ++c) {
    Values& result = results.emplace_back();
    for (size_t s = 0; s < streams(); ++s) {
      result.push_back(replicated(s) ? at::cat(by_stream[s], 1) : put_back(by_stream[s][c], s, c));
    }
    result.insert(result.end(), states[c].begin(), states[c].end());
  }
  return results;
}

std::vector<AttentionGradients> MatchedAttention::backward_blocks(const std::vector<Tensor>& dout,
                                                                  const std::vector<Values>& states,
                                                                  const std::vector<Tensor>& masks,
                                                                  double scale) const {
  const auto n = static_cast<size_t>(ring());
  const auto differentiate = [&](size_t block, const Tensor& k, const Tensor& v,
                                 const Tensor& mask) {
    const Values& own = states[block];
    return local_->backward(dout[block], own[kQ], k, v, own[kOut], own[kLse], mask, scale);
  };
  const at::ScalarType narrow = states[0][kQ].scalar_type();
  const at::ScalarType type = attention::accumulate_type(narrow);
  std::vector<AttentionGradients> result(n);
  if (n == 1) {
    result[0] = differentiate(0, states[0][kK], states[0][kV], masks[0]);
  } else if (chunks_.ring_mode == RingMode::kAllGather) {
    std::vector<Tensor> k, v, dk, dv;
    for (const Values& state : states) k.push_back(state[kK]), v.push_back(state[kV]);
    const Tensor mask = masks[0].defined() ? at::cat(masks, 1) : Tensor();
    for (size_t block = 0; block < n; ++block) {
      const AttentionGradients g = differentiate(block, at::cat(k, 1), at::cat(v, 1), mask);
      result[block].dq = g.dq;
      dk.push_back(g.dk.to(type)), dv.push_back(g.dv.to(type));
    }
    const auto dks = sum(dk).split_with_sizes(row_counts(k), 1);
    const auto dvs = sum(dv).split_with_sizes(row_counts(k), 1);
    for (size_t block = 0; block < n; ++block) {
      result[block].dk = dks[block], result[block].dv = dvs[block];
    }
  } else {
    // A block's dK, dV begin with its own queries and go on with those of the blocks behind it; dQ
    // with its own keys and goes on with those before it.
    for (size_t step = 0; step < n; ++step) {
      for (size_t block = 0; block < n; ++block) {
        const size_t from = (block + n - step) % n;
        const AttentionGradients g =
            differentiate(block, states[from][kK], states[from][kV], masks[from]);
        const auto add = [&](Tensor& total, const Tensor& share) {
          total = total.defined() ? total + share.to(type) : share.to(type);
        };
        add(result[block].dq, g.dq), add(result[from].dk, g.dk), add(result[from].dv, g.dv);
      }
    }
  }
  for (AttentionGradients& g : result) g = {g.dq.to(narrow), g.dk.to(narrow), g.dv.to(narrow)};
  return result;
}

std::vector<Values> MatchedAttention::backward(const std::vector<Values>& chunks,
                                               const Tensor& key_mask) const {
  std::vector<std::vector<Tensor>> rows(chunks.size());
  for (size_t s = 0; s < streams(); ++s) {
    Tensor all;  // cotangents of a stream that all chunks hold add up
    if (replicated(s)) {
      const at::ScalarType type = attention::accumulate_type(chunks[0][s].scalar_type());
      std::vector<Tensor> shares;
      for (const Values& chunk : chunks) shares.push_back(chunk[s].to(type));
      all = sum(shares).to(chunks[0][s].scalar_type());
    }
    for (size_t c = 0; c < chunks.size(); ++c) {
      rows[c].push_back(own_rows(all.defined() ? all : chunks[c][s], s, c));
    }
  }
  const std::vector<Tensor> dout = blocks(rows);
  const std::vector<Tensor> masks = block_masks(key_mask);
  const double scale = scale_of(dout[0]);

  // By block and part (q, k, v): each member's heads.
  std::vector<std::vector<std::vector<Tensor>>> grads(static_cast<size_t>(ring()),
                                                      std::vector<std::vector<Tensor>>(3));
  for (int member = 0; member < ulysses(); ++member) {
    std::vector<Tensor> own;
    std::vector<Values> states;
    for (int block = 0; block < ring(); ++block) {
      const Values& given = chunks[chunk(block, member)];
      own.push_back(heads_of(dout[static_cast<size_t>(block)], member));
      states.emplace_back(given.begin() + static_cast<int64_t>(streams()), given.end());
    }
    const auto by_block = backward_blocks(own, states, masks, scale);
    for (size_t b = 0; b < by_block.size(); ++b) {
      grads[b][0].push_back(by_block[b].dq);
      grads[b][1].push_back(by_block[b].dk);
      grads[b][2].push_back(by_block[b].dv);
    }
  }
  std::vector<Values> results;
  for (int block = 0; block < ring(); ++block) {
    for (int member = 0; member < ulysses(); ++member) {
      const size_t c = chunk(block, member);
      Values result(3 * streams());
      for (size_t part = 0; part < 3; ++part) {
        const auto cut =
            cut_streams(rows_of_chunk(grads[static_cast<size_t>(block)][part], block, member), c);
        for (size_t s = 0; s < streams(); ++s) result[3 * s + part] = put_back(cut[s], s, c);
      }
      results.push_back(std::move(result));
    }
  }
  return results;
}

}  // namespace shardproof::verify
