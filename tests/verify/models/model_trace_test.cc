// The check of a model's collectives sees blocks that do not talk, or recompute otherwise.
#include "tests/catch.h"
#include "tests/file_support.h"
#include "verify/models/model_run.h"

namespace shardproof::verify {
namespace {

// A world of one list of calls for all ranks.
class Recorded final : public RankWorld {
 public:
  explicit Recorded(const std::vector<std::string>& tags) {
    for (const std::string& tag : tags) {
      CollectiveCall call;
      call.group = "ulysses";
      call.number = static_cast<int64_t>(calls_.size());
      call.kind = CallKind::kAllToAll;
      call.tag = tag;
      calls_.push_back(call);
    }
  }
  int size() const override { return 2; }
  bool judges() const override { return true; }
  void plant(const sim::FaultPlan&) override {}
  void run(const RankProgram&, std::vector<RankResult>&) override {}
  const std::vector<CollectiveCall>& calls(int) const override { return calls_; }

 private:
  std::vector<CollectiveCall> calls_;
};

std::string problem(const char* words, const std::vector<std::string>& tags) {
  const ModelCase c = ModelCase::parse(std::string("models/flux/ulysses/ulysses2/fp64/") + words);
  const CheckResult result = check_model_trace(c, Recorded(tags));
  CHECK((result.status == Status::kPass) == result.detail.empty());
  return result.detail;
}

TEST_CASE("model trace: blocks talk in forward and backward", "[verify][models]") {
  CHECK(problem("b1", {"blocks.0/a", "output.gather", "blocks.0/a'"}).empty());
  CHECK(tests::contains(problem("b1", {"output.gather"}), "no block talks"));
  CHECK(tests::contains(problem("b1", {"blocks.0/a", "blocks.1/a", "blocks.1/a'"}),
                        "blocks.0 has 1 collectives in forward and 0 in backward"));
  CHECK(tests::contains(problem("b1", {"blocks.0/a'"}), "0 collectives in forward"));
}

TEST_CASE("model trace: a recomputed block repeats the forward's calls", "[verify][models]") {
  const std::vector<std::string> right = {"blocks.0/a",  "blocks.0/b",  "blocks.0/a~",
                                          "blocks.0/b~", "blocks.0/b'", "blocks.0/a'"};
  CHECK(problem("recompute", right).empty());
  CHECK(tests::contains(problem("b1", right), "without having been asked for"));
  auto swapped = right;
  std::swap(swapped[2], swapped[3]);
  CHECK(tests::contains(problem("recompute", swapped), "not the forward's 2 in order"));
  CHECK(
      tests::contains(problem("recompute", {"blocks.0/a", "blocks.0/a'"}), "issues 0 collectives"));
}

}  // namespace
}  // namespace shardproof::verify
