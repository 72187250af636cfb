#include "attention/ulysses.h"

#include <ATen/ATen.h>

#include "attention/local_attention.h"
#include "base/error.h"

namespace shardproof::attention {
namespace {

using at::Tensor;
using plan::Interval;

// Equal, adjacent, gapless intervals: one strided copy then serves all members.
bool is_even(const HeadRoute::Part& part) {
  const int64_t h = part.owned[0].size();
  for (size_t u = 0; u < part.owned.size(); ++u) {
    const auto begin = static_cast<int64_t>(u) * h;
    if (part.owned[u] != Interval{begin, begin + h}) return false;
  }
  return part.heads == h * static_cast<int64_t>(part.owned.size());
}

bool is_even(const HeadRoute& route) {
  return std::all_of(route.parts.begin(), route.parts.end(),
                     [](const HeadRoute::Part& part) { return is_even(part); });
}

// On a GPU a strided copy moves one element a thread: 16-byte elements are several times faster
// than 2-byte ones. Only a view of the same bytes.
void copy_wide(const Tensor& to, const Tensor& from) {
  const auto fits = [](const Tensor& t) {
    const int64_t per = 16 / t.element_size();
    if (t.stride(-1) != 1 || t.size(-1) % per != 0 || t.storage_offset() % per != 0) return false;
    for (int64_t d = 0; d + 1 < t.dim(); ++d) {
      if (t.stride(d) % per != 0) return false;
    }
    return true;
  };
  if (to.is_cuda() && to.scalar_type() == from.scalar_type() && fits(to) && fits(from)) {
    to.view(at::kComplexDouble).copy_(from.view(at::kComplexDouble));
  } else {
    to.copy_(from);
  }
}

// Heads [interval) of x [B,rows,heads,D] into `to` [rows,B,interval,D]; padding heads become zeros.
void copy_heads(const Tensor& to, const Tensor& x, Interval interval) {
  const int64_t real = std::clamp<int64_t>(x.size(2) - interval.begin, 0, interval.size());
  if (real > 0) {
    copy_wide(to.narrow(2, 0, real), x.narrow(2, interval.begin, real).transpose(0, 1));
  }
  if (real < interval.size()) to.narrow(2, real, interval.size() - real).zero_();
}

// What one rank sends: per part and stream its rows [B,rows,heads,D].
struct Outgoing {
  const HeadRoute& route;
  const std::vector<std::vector<Tensor>>& parts;
  int64_t rows, batch, dim;  // rows of all streams together
};

// All members' messages at once, [members, rows, B, heads, D]: one copy per part and stream.
void pack_evenly(const Tensor& buffer, const Outgoing& out) {
  const auto members = static_cast<int64_t>(out.route.parts[0].owned.size());
  const Tensor messages =
      buffer.view({members, out.rows, out.batch, out.route.heads_of(0), out.dim});
  int64_t head = 0;
  for (size_t p = 0; p < out.parts.size(); ++p) {
    const int64_t h = out.route.parts[p].owned[0].size();
    int64_t row = 0;
    for (const Tensor& x : out.parts[p]) {
      copy_wide(messages.narrow(1, row, x.size(1)).narrow(3, head, h),
                x.unflatten(2, {members, h}).permute({2, 1, 0, 3, 4}));
      row += x.size(1);
    }
    head += h;
  }
}

// One member's message [rows, B, its heads, D].
void pack_for(int member, const Tensor& message, const Outgoing& out) {
  int64_t head = 0;
  for (size_t p = 0; p < out.parts.size(); ++p) {
    const Interval owned = out.route.parts[p].owned[static_cast<size_t>(member)];
    int64_t row = 0;
    for (const Tensor& x : out.parts[p]) {
      copy_heads(message.narrow(0, row, x.size(1)).narrow(2, head, owned.size()), x, owned);
      row += x.size(1);
    }
    head += owned.size();
  }
}

}  // namespace

int64_t HeadRoute::heads_of(int ulysses_rank) const {
  int64_t heads = 0;
  for (const Part& part : parts) heads += part.owned[static_cast<size_t>(ulysses_rank)].size();
  return heads;
}

HeadRoute query_route(const plan::AttentionPlan& plan) {
  HeadRoute::Part q{plan.q_heads, {}};
  for (const plan::HeadShard& shard : plan.heads) q.owned.push_back(shard.q);
  return {{q}};
}

HeadRoute qkv_route(const plan::AttentionPlan& plan) {
  HeadRoute::Part kv{plan.kv_heads, {}};
  for (const plan::HeadShard& shard : plan.heads) kv.owned.push_back(shard.kv);
  return {{query_route(plan).parts[0], kv, kv}};
}

Ulysses::Ulysses(const plan::AttentionPlan& plan, const comm::Communicator& group, int sp_rank)
    : plan_(plan),
      group_(group),
      first_member_(sp_rank / plan.mesh.ulysses * plan.mesh.ulysses),
      me_(sp_rank % plan.mesh.ulysses) {
  SP_CHECK(group.size() == plan.mesh.ulysses && group.rank() == me_,
           "Ulysses group of {} ranks for {}", group.size(), plan.mesh.to_string());
}

std::vector<int64_t> Ulysses::rows_of_members() const {
  std::vector<int64_t> rows;
  for (int u = 0; u < group_.size(); ++u) rows.push_back(plan_.shard_rows(first_member_ + u));
  return rows;
}

std::vector<Tensor> Ulysses::seq_to_head(const HeadRoute& route,
                                         const std::vector<std::vector<Tensor>>& parts) const {
  const Tensor& like = parts[0][0];
  const int64_t batch = like.size(0), dim = like.size(3);
  const int members = group_.size();
  if (members == 1 && is_even(route)) {
    std::vector<Tensor> whole;
    for (const auto& s : parts) whole.push_back(s.size() == 1 ? s[0] : at::cat(s, 1));
    return whole;
  }
  const std::vector<int64_t> rows = rows_of_members();
  const int64_t mine = rows[static_cast<size_t>(me_)];
  std::vector<int64_t> sent, received;
  int64_t total = 0, block = 0;
  for (int u = 0; u < members; ++u) {
    sent.push_back(mine * batch * dim * route.heads_of(u));
    received.push_back(rows[static_cast<size_t>(u)] * batch * dim * route.heads_of(me_));
    total += sent.back();
    block += rows[static_cast<size_t>(u)];
  }
  Tensor buffer = at::empty({total}, like.options());
  const Outgoing out{route, parts, mine, batch, dim};
  if (is_even(route)) {
    pack_evenly(buffer, out);
  } else {
    int64_t from = 0;
    for (int u = 0; u < members; ++u) {
      const int64_t count = sent[static_cast<size_t>(u)];
      pack_for(u, buffer.narrow(0, from, count).view({mine, batch, route.heads_of(u), dim}), out);
      from += count;
    }
  }
  const Tensor arrived = group_.all_to_all(std::move(buffer), sent, received).wait();
  const Tensor tokens = arrived.view({block, batch, route.heads_of(me_), dim});
  std::vector<Tensor> result;
  int64_t at = 0;
  for (const HeadRoute::Part& part : route.parts) {
    const int64_t h = part.owned[static_cast<size_t>(me_)].size();
    result.push_back(tokens.narrow(2, at, h).transpose(0, 1));
    at += h;
  }
  return result;
}

namespace {

// One part as it arrived, [mine, B, heads of member u, D] from each member u in turn, into
// [B, mine, heads, D].
Tensor join_heads(const Tensor& arrived, const HeadRoute::Part& part, int64_t batch, int64_t mine,
                  int64_t dim) {
  const auto members = static_cast<int64_t>(part.owned.size());
  if (is_even(part)) {
    const int64_t h = part.owned[0].size();
    Tensor whole = at::empty({batch, mine, part.heads, dim}, arrived.options());
    copy_wide(whole.unflatten(2, {members, h}),
              arrived.view({members, mine, batch, h, dim}).permute({2, 1, 0, 3, 4}));
    return whole;
  }
  const at::ScalarType type = accumulate_type(arrived.scalar_type());
  Tensor whole = at::zeros({batch, mine, part.heads, dim}, arrived.options().dtype(type));
  int64_t from = 0;
  for (const Interval heads : part.owned) {
    const int64_t count = mine * batch * heads.size() * dim;
    const Tensor message = arrived.narrow(0, from, count).view({mine, batch, heads.size(), dim});
    const int64_t real = std::clamp<int64_t>(part.heads - heads.begin, 0, heads.size());
    if (real > 0) {
      whole.narrow(2, heads.begin, real).add_(message.narrow(2, 0, real).transpose(0, 1).to(type));
    }
    from += count;
  }
  return whole.to(arrived.scalar_type());
}

}  // namespace

std::vector<Tensor> Ulysses::head_to_seq(const HeadRoute& route, std::vector<Tensor> parts) const {
  const int members = group_.size();
  if (members == 1 && is_even(route)) return parts;
  const int64_t batch = parts[0].size(0), dim = parts[0].size(3);
  const std::vector<int64_t> rows = rows_of_members();
  const int64_t mine = rows[static_cast<size_t>(me_)];
  std::vector<comm::Communicator::RowCounts> counts(parts.size());
  for (size_t p = 0; p < parts.size(); ++p) {
    const auto& owned = route.parts[p].owned;
    for (size_t u = 0; u < owned.size(); ++u) {
      counts[p].send.push_back(rows[u] * batch * dim * owned[static_cast<size_t>(me_)].size());
      counts[p].receive.push_back(mine * batch * dim * owned[u].size());
    }
    parts[p] = parts[p].transpose(0, 1).contiguous().view({-1});
  }
  const std::vector<Tensor> arrived = group_.all_to_all_step(std::move(parts), counts);
  std::vector<Tensor> result;
  for (size_t p = 0; p < arrived.size(); ++p) {
    result.push_back(join_heads(arrived[p], route.parts[p], batch, mine, dim));
  }
  return result;
}

}  // namespace shardproof::attention
