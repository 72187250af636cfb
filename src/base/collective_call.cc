#include "base/collective_call.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>

#include "base/error.h"

namespace shardproof {

const char* to_string(CallKind kind) {
  switch (kind) {
    case CallKind::kAllToAll:
      return "all_to_all";
    case CallKind::kAllGather:
      return "all_gather";
    case CallKind::kReduceScatter:
      return "reduce_scatter";
    case CallKind::kAllReduce:
      return "all_reduce";
    case CallKind::kBroadcast:
      return "broadcast";
    case CallKind::kSend:
      return "send";
    case CallKind::kRecv:
      return "recv";
    case CallKind::kBarrier:
      return "barrier";
  }
  return "?";
}

std::string CollectiveCall::describe() const {
  std::string text = to_string(kind);
  if (!dtype.empty()) text += " " + dtype;
  if (!send.empty()) text += fmt::format(" send={}", send);
  if (!receive.empty()) text += fmt::format(" receive={}", receive);
  if (root >= 0) text += fmt::format(" root={}", root);
  if (peer >= 0) text += fmt::format(" peer={}", peer);
  if (!reduce_op.empty()) text += " op=" + reduce_op;
  return text;
}

std::string CollectiveCall::to_json_line() const {
  nlohmann::ordered_json line = {{"group", group},    {"call", number}, {"kind", to_string(kind)},
                                 {"tag", tag},        {"dtype", dtype}, {"send", send},
                                 {"receive", receive}};
  if (root >= 0) line["root"] = root;
  if (peer >= 0) line["peer"] = peer;
  if (!reduce_op.empty()) line["op"] = reduce_op;
  return line.dump();
}

namespace {

// Elements that the call sends to member `index`.
int64_t sent_to(const CollectiveCall& call, int index) {
  if (call.send.empty()) return 0;
  return call.send.size() == 1 ? call.send[0] : call.send.at(static_cast<size_t>(index));
}

int64_t received_from(const CollectiveCall& call, int index) {
  if (call.receive.empty()) return 0;
  return call.receive.size() == 1 ? call.receive[0] : call.receive.at(static_cast<size_t>(index));
}

std::string size_mismatch(const CollectiveCall& from, int from_index, const CollectiveCall& to,
                          int to_index) {
  const int64_t sent = sent_to(from, to_index);
  const int64_t expected = received_from(to, from_index);
  if (sent == expected) return {};
  return fmt::format("sizes differ: member {} sends {} elements to member {}, which expects {}",
                     from_index, sent, to_index, expected);
}

}  // namespace

std::string mismatch(const CollectiveCall& a, int a_index, const CollectiveCall& b, int b_index) {
  const bool point_to_point = a.kind == CallKind::kSend || a.kind == CallKind::kRecv;
  if (!point_to_point && a.kind != b.kind) {
    return fmt::format("kinds differ: {} and {}", to_string(a.kind), to_string(b.kind));
  }
  if (a.dtype != b.dtype) return fmt::format("dtypes differ: {} and {}", a.dtype, b.dtype);
  if (a.root != b.root) return fmt::format("roots differ: {} and {}", a.root, b.root);
  if (a.reduce_op != b.reduce_op) {
    return fmt::format("reduce operations differ: {} and {}", a.reduce_op, b.reduce_op);
  }
  if (a.kind == CallKind::kAllReduce || a.kind == CallKind::kBroadcast) {
    if (a.send != b.send) return fmt::format("sizes differ: {} and {} elements", a.send, b.send);
  } else {
    if (auto text = size_mismatch(a, a_index, b, b_index); !text.empty()) return text;
    if (auto text = size_mismatch(b, b_index, a, a_index); !text.empty()) return text;
  }
  if (a.tag != b.tag) return fmt::format("tags differ: '{}' and '{}'", a.tag, b.tag);
  return {};
}

}  // namespace shardproof
