#include "verify/process_rank_world.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/error.h"

namespace shardproof::verify {
namespace {

class Writer {
 public:
  void number(int64_t value) { bytes(&value, sizeof(value)); }
  void text(const std::string& value) {
    number(static_cast<int64_t>(value.size()));
    bytes(value.data(), value.size());
  }
  void numbers(at::IntArrayRef values) {
    number(static_cast<int64_t>(values.size()));
    for (const int64_t value : values) number(value);
  }
  void bytes(const void* data, size_t size) { out_.append(static_cast<const char*>(data), size); }
  std::string take() { return std::move(out_); }

 private:
  std::string out_;
};

class Reader {
 public:
  explicit Reader(const std::string& in) : in_(in) {}
  int64_t number() {
    int64_t value = 0;
    bytes(&value, sizeof(value));
    return value;
  }
  std::string text() {
    std::string value(static_cast<size_t>(number()), '\0');
    bytes(value.data(), value.size());
    return value;
  }
  std::vector<int64_t> numbers() {
    std::vector<int64_t> values(static_cast<size_t>(number()));
    for (int64_t& value : values) value = number();
    return values;
  }
  void bytes(void* data, size_t size) {
    SP_CHECK(at_ + size <= in_.size(), "a rank's results end after {} bytes", in_.size());
    std::memcpy(data, in_.data() + at_, size);
    at_ += size;
  }

 private:
  const std::string& in_;
  size_t at_ = 0;
};

void write_call(Writer& out, const CollectiveCall& call) {
  for (const std::string* text : {&call.group, &call.tag, &call.dtype, &call.reduce_op}) {
    out.text(*text);
  }
  out.numbers({call.number, static_cast<int64_t>(call.kind), call.root, call.peer});
  out.numbers(call.send);
  out.numbers(call.receive);
}

CollectiveCall read_call(Reader& in) {
  CollectiveCall call;
  for (std::string* text : {&call.group, &call.tag, &call.dtype, &call.reduce_op}) {
    *text = in.text();
  }
  const auto numbers = in.numbers();
  call.number = numbers.at(0);
  call.kind = static_cast<CallKind>(numbers.at(1));
  call.root = static_cast<int>(numbers.at(2));
  call.peer = static_cast<int>(numbers.at(3));
  call.send = in.numbers();
  call.receive = in.numbers();
  return call;
}

}  // namespace

std::string pack(const RankReport& report) {
  Writer out;
  out.number(static_cast<int64_t>(report.result.size()));
  for (const auto& [name, x] : report.result) {
    const at::Tensor dense = x.detach().cpu().contiguous();
    out.text(name);
    out.number(static_cast<int64_t>(dense.scalar_type()));
    out.numbers(dense.sizes());
    out.bytes(dense.const_data_ptr(), dense.nbytes());
  }
  out.number(static_cast<int64_t>(report.calls.size()));
  for (const CollectiveCall& call : report.calls) write_call(out, call);
  out.text(report.flight_difference);
  out.text(report.refusal);
  return out.take();
}

RankReport unpack(const std::string& bytes) {
  Reader in(bytes);
  RankReport report;
  for (int64_t left = in.number(); left > 0; --left) {
    const std::string name = in.text();
    const auto type = static_cast<at::ScalarType>(in.number());
    const auto shape = in.numbers();
    const at::Tensor x = at::empty(shape, at::TensorOptions(type));
    in.bytes(x.mutable_data_ptr(), x.nbytes());
    report.result[name] = x;
  }
  for (int64_t left = in.number(); left > 0; --left) report.calls.push_back(read_call(in));
  report.flight_difference = in.text();
  report.refusal = in.text();
  return report;
}

namespace {

int64_t total(const std::vector<int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

// How the flight recorder calls it, and how many elements it says.
std::pair<std::string, int64_t> as_recorded(const CollectiveCall& call) {
  const int64_t sent = total(call.send), received = total(call.receive);
  switch (call.kind) {
    case CallKind::kAllToAll:
      return {"all_to_all", sent};
    case CallKind::kAllGather:
      return {"_all_gather_base", call.send.empty() ? 0 : call.send[0]};
    case CallKind::kReduceScatter:
      return {"_reduce_scatter_base", sent};
    case CallKind::kAllReduce:
      return {"all_reduce", std::max(sent, received)};
    case CallKind::kBroadcast:
      return {"broadcast", std::max(sent, received)};
    case CallKind::kSend:
      return {"send", sent};
    case CallKind::kRecv:
      return {"recv", received};
    case CallKind::kBarrier:
      return {"all_reduce_barrier", 0};
  }
  return {};
}

}  // namespace

std::string flight_difference(const std::vector<CollectiveCall>& calls,
                              const std::vector<comm::FlightRecord>& records) {
  std::vector<comm::FlightRecord> real;
  for (const comm::FlightRecord& record : records) {
    if (record.name != "coalesced") real.push_back(record);  // the step, beside its calls
  }
  for (size_t i = 0; i < std::min(calls.size(), real.size()); ++i) {
    const auto [name, count] = as_recorded(calls[i]);
    const bool same_kind = real[i].name == name || real[i].name.starts_with(name + " ");
    const int64_t recorded = name == "recv" ? real[i].output : real[i].input;
    if (same_kind && (name == "all_reduce_barrier" || recorded == count)) continue;
    return fmt::format("collective {} was issued as {} ({} elements); the backend recorded {} ({})",
                       i, calls[i].to_json_line(), count, real[i].name, recorded);
  }
  if (calls.size() == real.size()) return {};
  return fmt::format("{} collectives were issued, the backend recorded {}", calls.size(),
                     real.size());
}

void ProcessRankWorld::plant(const sim::FaultPlan& faults) {
  if (!faults.empty()) bad_input("faults are planted in simulated worlds only");
}

void ProcessRankWorld::run(const RankProgram& program, std::vector<RankResult>& results) {
  world_.barrier();  // rank 0 may still have been judging: collectives do not wait that long
  world_.clear_log();
  RankReport report;
  try {
    report.result = program(world_);
  } catch (const std::exception& error) {
    const auto* refused = dynamic_cast<const Error*>(&error);
    if (!refused || refused->kind() != ErrorKind::kBadInput || !world_.log().calls().empty()) {
      fail(error.what());
    }
    report.refusal = error.what();
  }
  report.calls = world_.log().calls();
  if (world_.keeps_flight_records()) {
    report.flight_difference = flight_difference(report.calls, world_.flight_records());
  }
  collect(world_.gather(pack(report)), results);
}

void ProcessRankWorld::fail(const std::string& what) {
  const std::string text =
      fmt::format("rank {} failed after {}: {}{}", world_.rank(), world_.log().progress(),
                  what.substr(0, what.find("\nException raised from")), others());
  world_.announce_failure(text);
  internal_error("{}", text);
}

// How far the ranks are, which names the one that others wait for. Empty if that cannot be known.
std::string ProcessRankWorld::others() const {
  try {
    return fmt::format(" (the ranks a moment ago: {})", world_.progress());
  } catch (const std::exception&) {  // rank 0 and its store are gone
    return {};
  }
}

void ProcessRankWorld::collect(const std::vector<std::string>& reports,
                               std::vector<RankResult>& results) {
  results.assign(reports.size(), {});
  calls_.assign(reports.size(), {});
  findings_.clear();
  CheckResult trace{"trace", Status::kPass, {}};
  for (size_t r = 0; r < reports.size(); ++r) {
    RankReport report = unpack(reports[r]);
    if (!report.refusal.empty()) bad_input("{}", report.refusal);
    results[r] = std::move(report.result);
    calls_[r] = std::move(report.calls);
    if (report.flight_difference.empty()) continue;
    trace = {"trace", Status::kFail, fmt::format("rank {}: {}", r, report.flight_difference)};
  }
  if (world_.keeps_flight_records()) findings_ = {trace};
}

const std::vector<CollectiveCall>& ProcessRankWorld::calls(int rank) const {
  return calls_.at(static_cast<size_t>(rank));
}

RankWorld& ProcessWorlds::get(int ranks) {
  if (ranks != ranks_.size()) {
    bad_input("the case needs {} ranks; this world has {}", ranks, ranks_.size());
  }
  return ranks_;
}

}  // namespace shardproof::verify
