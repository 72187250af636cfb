#include "verify/process_rank_world.h"

#include <ATen/ATen.h>

#include <cstring>

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

std::string pack(const RankResult& result, const std::vector<CollectiveCall>& calls) {
  Writer out;
  out.number(static_cast<int64_t>(result.size()));
  for (const auto& [name, x] : result) {
    const at::Tensor dense = x.detach().cpu().contiguous();
    out.text(name);
    out.number(static_cast<int64_t>(dense.scalar_type()));
    out.numbers(dense.sizes());
    out.bytes(dense.const_data_ptr(), dense.nbytes());
  }
  out.number(static_cast<int64_t>(calls.size()));
  for (const CollectiveCall& call : calls) write_call(out, call);
  return out.take();
}

void unpack(const std::string& bytes, RankResult& result, std::vector<CollectiveCall>& calls) {
  Reader in(bytes);
  result.clear();
  calls.clear();
  for (int64_t left = in.number(); left > 0; --left) {
    const std::string name = in.text();
    const auto type = static_cast<at::ScalarType>(in.number());
    const auto shape = in.numbers();
    const at::Tensor x = at::empty(shape, at::TensorOptions(type));
    in.bytes(x.mutable_data_ptr(), x.nbytes());
    result[name] = x;
  }
  for (int64_t left = in.number(); left > 0; --left) calls.push_back(read_call(in));
}

void ProcessRankWorld::plant(const sim::FaultPlan& faults) {
  if (!faults.empty()) bad_input("faults are planted in simulated worlds only");
}

void ProcessRankWorld::run(const RankProgram& program, std::vector<RankResult>& results) {
  world_.barrier();  // rank 0 may still have been judging: collectives do not wait that long
  world_.log().clear();
  RankResult mine;
  try {
    mine = program(world_);
  } catch (const std::exception& error) {
    const auto calls = world_.log().calls();
    const std::string what = error.what();
    const std::string text = fmt::format(
        "rank {} failed{}: {}", world_.rank(),
        calls.empty() ? std::string()
                      : fmt::format(", its last collective was {} in group '{}', tag '{}'",
                                    calls.back().describe(), calls.back().group, calls.back().tag),
        what.substr(0, what.find("\nException raised from")));
    world_.announce_failure(text);
    internal_error("{}", text);
  }
  const std::vector<std::string> all = world_.gather(pack(mine, world_.log().calls()));
  results.assign(all.size(), {});
  calls_.assign(all.size(), {});
  for (size_t r = 0; r < all.size(); ++r) unpack(all[r], results[r], calls_[r]);
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
