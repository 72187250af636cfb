#include "verify/matched/lockstep.h"

#include <ATen/ATen.h>

#include "base/error.h"
#include "tests/catch.h"

namespace shardproof::verify {
namespace {

using Values = Lockstep::Values;

TEST_CASE("lockstep: the last to come computes for all, meeting after meeting", "[matched]") {
  Lockstep lockstep(3, at::kCPU);
  std::vector<double> got(3);
  lockstep.run([&](int member) {
    at::Tensor x = at::full({1}, member + 1.0, at::kDouble);
    for (int i = 0; i < 100; ++i) {
      // Each gets the sum without its own.
      x = lockstep.meet(member, "sum", {x}, [](const std::vector<Values>& all) {
        const at::Tensor sum = all[0][0] + all[1][0] + all[2][0];
        std::vector<Values> results;
        for (const Values& mine : all) results.push_back({(sum - mine[0]) / 2});
        return results;
      })[0];
    }
    got[static_cast<size_t>(member)] = x.item<double>();
  });
  for (const double x : got) CHECK(std::abs(x - 2) < 1e-12);  // the mean, at last
}

TEST_CASE("lockstep: a member that fails ends the others", "[matched]") {
  Lockstep lockstep(2, at::kCPU);
  const auto same = [](const std::vector<Values>& all) { return all; };
  const auto error_of = [&](const std::function<void(int)>& program) -> std::string {
    try {
      lockstep.run(program);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  CHECK(error_of([&](int member) {
          if (member == 1) bad_input("no more");
          lockstep.meet(member, "here", {}, same);
        }) == "no more");
  CHECK(error_of([&](int member) {
          lockstep.meet(member, member == 0 ? "a" : "b", {}, same);
        }).find("meets the others in") != std::string::npos);
  bool done = false;  // usable again
  lockstep.run([&](int member) {
    lockstep.meet(member, "here", {}, same);
    if (member == 0) done = true;
  });
  CHECK(done);
}

}  // namespace
}  // namespace shardproof::verify
