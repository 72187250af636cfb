#include "verify/collectives_case.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include "base/error.h"
#include "comm/mesh.h"
#include "comm/random_streams.h"
#include "comm/tag.h"
#include "verify/case_id.h"
#include "verify/dtype.h"
#include "verify/rng_check.h"

namespace shardproof::verify {
namespace {

using at::Tensor;
using comm::Reduce;

// Rows that rank `from` sends to rank `to`: uneven, some none.
int64_t rows_between(int from, int to) { return (from + 2 * to) % 4; }
std::vector<int64_t> uneven_rows(int ranks) {
  std::vector<int64_t> rows;
  for (int r = 0; r < ranks; ++r) rows.push_back(1 + (r * 3) % 4);
  return rows;
}
int64_t sum(const std::vector<int64_t>& rows) {
  int64_t total = 0;
  for (const int64_t n : rows) total += n;
  return total;
}

// What rank `rank` puts into the named collective. Integers of a few bits: their sums over 64 ranks
// are exact in bf16 as well.
Tensor input(const CollectivesCase& c, const std::string& name, int rank, int64_t rows) {
  uint64_t hash = comm::derive_seed(c.seed, static_cast<uint64_t>(rank));
  for (const unsigned char byte : name) hash = comm::derive_seed(hash, byte);
  at::Generator generator = at::detail::createCPUGenerator(hash);
  const Tensor x = c.integers
                       ? at::randint(-2, 3, {rows, 3}, generator, at::TensorOptions(at::kDouble))
                       : at::randn({rows, 3}, generator, at::TensorOptions(at::kDouble));
  return x.to(c.dtype);
}

std::vector<int64_t> sent_by(int rank, int ranks) {
  std::vector<int64_t> rows;
  for (int to = 0; to < ranks; ++to) rows.push_back(rows_between(rank, to));
  return rows;
}
std::vector<int64_t> received_by(int rank, int ranks) {
  std::vector<int64_t> rows;
  for (int from = 0; from < ranks; ++from) rows.push_back(rows_between(from, rank));
  return rows;
}

constexpr std::pair<const char*, Reduce> kReductions[] = {{"sum", Reduce::kSum},
                                                          {"max", Reduce::kMax}};

// What a rank draws: a dropout mask in common with the other ranks, and noise of its own.
void draw_random(const CollectivesCase& c, const comm::Mesh& mesh, int rank, RankResult& results) {
  comm::RandomStreams streams(c.seed, mesh.shape(), rank, mesh.device());
  const auto options = at::TensorOptions(mesh.device());
  at::Generator& common_generator = streams.replica();
  at::Generator& own_generator = streams.rank();
  results["rng.replica"] = at::rand({64}, common_generator, options).ge(0.1).cpu();
  results["rng.rank"] = at::randn({8}, own_generator, options).cpu();
  results["rng.state"] =
      at::scalar_tensor(static_cast<int64_t>(streams.replica_fingerprint()), at::kLong);
}

RankResult run_collectives(const CollectivesCase& c, comm::BackendFactory& factory) {
  const comm::Mesh mesh(factory, {1, 1, c.ranks});
  const comm::Communicator& group = mesh.sp();
  const int me = group.rank(), n = c.ranks;
  const auto mine = [&](const std::string& name, int64_t rows) {
    return input(c, name, me, rows).to(factory.device());
  };
  RankResult results;
  const auto keep = [&](const std::string& name, const Tensor& x) { results[name] = x.cpu(); };
  const comm::CollectiveScope scope("collectives");
  keep("all_to_all",
       group.all_to_all(mine("all_to_all", sum(sent_by(me, n))), sent_by(me, n), received_by(me, n))
           .wait());
  const auto rows = uneven_rows(n);
  keep("all_gather",
       group.all_gather(mine("all_gather", rows[static_cast<size_t>(me)]), rows).wait());
  for (const auto& [name, op] : kReductions) {
    keep(std::string("reduce_scatter.") + name,
         group.reduce_scatter(mine("reduce_scatter", sum(rows)), rows, op).wait());
    keep(std::string("all_reduce.") + name, group.all_reduce(mine("all_reduce", 5), op).wait());
  }
  for (int root = 0; root < n; ++root) {
    keep(fmt::format("broadcast.{}", root), group.broadcast(mine("broadcast", 4), root).wait());
  }
  const int from = (me + n - 1) % n;
  keep("exchange",
       group.exchange(mine("exchange", 2 + me), (me + 1) % n, {2 + from, 3}, from).wait());
  group.barrier();
  draw_random(c, mesh, me, results);
  return results;
}

// The same from all ranks' inputs, without communication.
RankResult expected_results(const CollectivesCase& c, int me) {
  const int n = c.ranks;
  RankResult results;
  std::vector<Tensor> parts;
  for (int from = 0; from < n; ++from) {
    const auto sent = sent_by(from, n);
    int64_t at = 0;
    for (int to = 0; to < me; ++to) at += sent[static_cast<size_t>(to)];
    parts.push_back(
        input(c, "all_to_all", from, sum(sent)).narrow(0, at, sent[static_cast<size_t>(me)]));
  }
  results["all_to_all"] = at::cat(parts, 0);
  const auto rows = uneven_rows(n);
  const auto stacked = [&](const std::string& name, int64_t count) {
    std::vector<Tensor> all;
    for (int r = 0; r < n; ++r) all.push_back(input(c, name, r, count).to(at::kDouble));
    return at::stack(all, 0);
  };
  parts.clear();
  int64_t before = 0;
  for (int r = 0; r < n; ++r) {
    parts.push_back(input(c, "all_gather", r, rows[static_cast<size_t>(r)]));
    if (r < me) before += rows[static_cast<size_t>(r)];
  }
  results["all_gather"] = at::cat(parts, 0);
  for (const auto& [name, op] : kReductions) {
    const auto reduce = [&, op = op](const Tensor& all) {
      return (op == Reduce::kSum ? all.sum(0) : std::get<0>(all.max(0))).to(c.dtype);
    };
    results[std::string("reduce_scatter.") + name] =
        reduce(stacked("reduce_scatter", sum(rows)))
            .narrow(0, before, rows[static_cast<size_t>(me)]);
    results[std::string("all_reduce.") + name] = reduce(stacked("all_reduce", 5));
  }
  for (int root = 0; root < n; ++root) {
    results[fmt::format("broadcast.{}", root)] = input(c, "broadcast", root, 4);
  }
  const int from = (me + n - 1) % n;
  results["exchange"] = input(c, "exchange", from, 2 + from);
  return results;
}

class CollectivesCheck final : public Case {
 public:
  explicit CollectivesCheck(const CollectivesCase& c) : case_(c) {}
  std::string id() const override { return case_.id(); }
  CasePtr shrunk(const std::function<bool(const Case&)>&) const override { return nullptr; }

  CaseResult check(Worlds& worlds) const override {
    return judged(id(), {1, 1, case_.ranks}, [&](CaseResult& result) {
      RankWorld& world = worlds.get(case_.ranks);
      std::vector<RankResult> results;
      const auto program = [&](comm::BackendFactory& rank) { return run_collectives(case_, rank); };
      if (!run_ranks(world, {}, program, results, result.checks)) return;
      if (case_.integers) result.checks.push_back(compare(results));
      result.checks.push_back(compare_random(results));
      for (CheckResult& finding : world.findings()) result.checks.push_back(std::move(finding));
    });
  }

 private:
  CheckResult compare(const std::vector<RankResult>& results) const {
    for (int r = 0; r < case_.ranks; ++r) {
      for (const auto& [name, expected] : expected_results(case_, r)) {
        const RankResult& got = results[static_cast<size_t>(r)];
        const auto it = got.find(name);
        if (it != got.end() && it->second.sizes() == expected.sizes() &&
            at::equal(it->second, expected)) {
          continue;
        }
        return {"bitwise", Status::kFail, fmt::format("rank {}: {} is not exact", r, name)};
      }
    }
    return {"bitwise", Status::kPass, {}};
  }

  CheckResult compare_random(const std::vector<RankResult>& results) const {
    std::vector<uint64_t> fingerprints;
    for (const RankResult& rank : results) {
      fingerprints.push_back(static_cast<uint64_t>(rank.at("rng.state").item<int64_t>()));
    }
    CheckResult check = check_rng({1, 1, case_.ranks}, fingerprints);
    const auto fail = [&](size_t rank, const char* what) {
      if (check.status == Status::kFail) return;
      check = {"rng", Status::kFail, fmt::format("ranks 0 and {} draw {}", rank, what)};
    };
    for (size_t r = 1; r < results.size(); ++r) {
      const auto same = [&](const char* name) {
        return at::equal(results[0].at(name), results[r].at(name));
      };
      if (!same("rng.replica")) fail(r, "other masks for a tensor that they hold in common");
      if (same("rng.rank")) fail(r, "the same noise for their own shards");
    }
    return check;
  }

  CollectivesCase case_;
};

}  // namespace

std::string CollectivesCase::id() const {
  const comm::MeshShape mesh{1, 1, ranks};
  return fmt::format("transports/collectives/{}/{}/{}/{}#{}",
                     mode_name(mesh, plan::RingMode::kRotate), mesh.to_string(), dtype_name(dtype),
                     integers ? "integers" : "random", seed);
}

CollectivesCase CollectivesCase::parse(std::string_view id) {
  const CaseIdParts parts = parse_case_id(id, {"transports"});
  if (parts.subject != "collectives" || parts.mesh.ulysses != parts.mesh.world() ||
      (parts.variant != "integers" && parts.variant != "random")) {
    bad_input(
        "case '{}': expected transports/collectives/ulysses/ulysses<n>/<dtype>/integers or random",
        id);
  }
  return {parts.mesh.ulysses, parts.dtype, parts.variant == "integers", parts.seed};
}

CasePtr collectives_check(const CollectivesCase& c) {
  return std::make_shared<CollectivesCheck>(c);
}

std::vector<CollectivesCase> collectives_suite(int ranks, uint64_t seed) {
  std::vector<CollectivesCase> cases;
  for (const c10::ScalarType dtype : all_dtypes()) {
    for (const bool integers : {true, false}) cases.push_back({ranks, dtype, integers, seed});
  }
  return cases;
}

}  // namespace shardproof::verify
