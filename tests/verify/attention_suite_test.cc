// What the suites hold, and that the product passes them.
#include "verify/suites/attention_suite.h"
#include "verify/suites/model_suite.h"

#include "tests/catch.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <map>
#include <set>
#include <tuple>

#include "tests/file_support.h"
#include "verify/attention/attention_check.h"
#include "verify/dtype.h"
#include "verify/runner.h"

namespace shardproof::verify {
namespace {

const std::set<std::string> kModes = {"ulysses", "ring", "allgather", "hybrid", "hybrid_allgather"};

std::set<std::string> modes_of(const std::vector<AttentionCase>& cases, int sp) {
  std::set<std::string> modes;
  for (const AttentionCase& c : cases) {
    if (c.mesh.sp() == sp) modes.insert(c.mode());
  }
  return modes;
}

// Modes of the meshes with `sp` ranks: hybrids need two factors.
std::set<std::string> possible_modes(int sp) {
  if (sp == 1) return {"local"};
  if (sp == 4 || sp == 6 || sp == 8) return kModes;
  return {"ulysses", "ring", "allgather"};
}

bool has(const std::vector<AttentionCase>& cases,
         const std::function<bool(const AttentionCase&)>& property) {
  return std::any_of(cases.begin(), cases.end(), property);
}

// Every feature, at least once in each dtype of the set.
void check_features(const std::vector<AttentionCase>& cases) {
  for (const c10::ScalarType dtype : all_dtypes()) {
    INFO(dtype_name(dtype));
    const auto some = [&](const std::function<bool(const AttentionCase&)>& property) {
      return has(cases, [&](const AttentionCase& c) { return c.dtype == dtype && property(c); });
    };
    for (const MaskKind mask :
         {MaskKind::kNone, MaskKind::kRagged, MaskKind::kScattered, MaskKind::kEmptyRank}) {
      INFO("mask " << static_cast<int>(mask));
      CHECK(some([&](const auto& c) { return c.mask == mask; }));
    }
    for (const std::string& mode : kModes) {
      INFO(mode);
      CHECK(some([&](const auto& c) { return c.mode() == mode; }));
    }
    CHECK(some([](const auto& c) { return c.text == 0; }));
    CHECK(some([](const auto& c) {
      return c.text_placement == plan::StreamPlacement::kReplicated && c.mesh.sp() > 1;
    }));
    CHECK(some([](const auto& c) {
      return c.token_split == plan::TokenSplit::kPadded && c.image % c.mesh.sp() != 0;
    }));
    CHECK(some([](const auto& c) {
      return c.token_split == plan::TokenSplit::kUneven && c.image % c.mesh.sp() != 0;
    }));
    CHECK(some([](const auto& c) {
      return c.head_split == plan::HeadSplit::kUneven && c.heads % c.mesh.ulysses != 0;
    }));
    CHECK(some([](const auto& c) {
      return c.head_split == plan::HeadSplit::kPadded && c.heads % c.mesh.ulysses != 0;
    }));
    CHECK(some([](const auto& c) { return c.kv_heads < c.heads; }));
    CHECK(some([](const auto& c) { return c.kv_heads < c.mesh.ulysses; }));
    CHECK(some([](const auto& c) { return c.strided; }));
    CHECK(some([](const auto& c) { return c.mesh.dp > 1; }));
    CHECK(some([](const auto& c) { return c.head_dim % 16 != 0; }));
    // Local tokens and local heads alike in number: a transposed layout fits without an error.
    CHECK(some([](const auto& c) {
      return c.tokens() / c.mesh.ring == c.heads / c.mesh.ulysses &&
             c.tokens() % c.mesh.ring == 0 && c.heads % c.mesh.ulysses == 0;
    }));
    CHECK(some([](const auto& c) { return c.is_even() && c.mesh.ulysses > 1; }));
    for (int64_t batch = 1; batch <= 3; ++batch) {
      CHECK(some([&](const auto& c) { return c.batch == batch; }));
    }
  }
}

TEST_CASE("attention suite: the default suite holds every mode and feature", "[verify][suite]") {
  const auto cases = attention_suite({}, 1, /*quick=*/false);
  for (int sp = 1; sp <= 8; ++sp) {
    INFO("sp " << sp);
    CHECK(modes_of(cases, sp) == possible_modes(sp));
  }
  check_features(cases);
  CHECK(has(cases, [](const auto& c) { return c.mask == MaskKind::kOneKey; }));
}

TEST_CASE("attention suite: the quick suite holds every mode and feature, too", "[verify][suite]") {
  const auto quick = attention_suite({}, 1, /*quick=*/true);
  CHECK(quick.size() * 4 < attention_suite({}, 1, false).size());
  for (const int sp : {2, 3, 4, 8}) CHECK(modes_of(quick, sp) == possible_modes(sp));
  std::set<std::string> pairs;
  std::set<MaskKind> masks;
  for (const AttentionCase& c : quick) {
    pairs.insert(c.mode() + dtype_name(c.dtype));
    masks.insert(c.mask);
  }
  CHECK(pairs.size() == kModes.size() * all_dtypes().size());
  for (const MaskKind mask :
       {MaskKind::kNone, MaskKind::kRagged, MaskKind::kScattered, MaskKind::kEmptyRank}) {
    CHECK(masks.count(mask) == 1);
  }
}

TEST_CASE("attention suite: filters narrow it, and larger sp can be asked for", "[verify][suite]") {
  CaseFilter filter;
  filter.sp = {12};
  filter.ring = {3, 4};
  filter.dtypes = {at::kBFloat16};
  filter.backend = "math";
  const auto cases = attention_suite(filter, 1, false);
  CHECK(!cases.empty());
  for (const AttentionCase& c : cases) {
    CHECK(c.mesh.sp() == 12);
    CHECK((c.mesh.ring == 3 || c.mesh.ring == 4));
    CHECK(c.dtype == at::kBFloat16);
    CHECK(c.backend == "math");
  }
  CHECK(!has(attention_suite({}, 1, false), [](const auto& c) { return c.mesh.sp() > 8; }));
  filter.sp = {7};
  CHECK(attention_suite(filter, 1, false).empty());  // no 7 = 3 x n

  CaseFilter replicas;
  replicas.dp = {2};
  CHECK(!attention_suite(replicas, 1, false).empty());
  for (const AttentionCase& c : attention_suite(replicas, 1, false)) CHECK(c.mesh.dp == 2);
}

TEST_CASE("attention suite: the seed changes data, not cases", "[verify][suite]") {
  const auto one = attention_suite({}, 1, false), again = attention_suite({}, 1, false),
             other = attention_suite({}, 2, false);
  REQUIRE(one.size() == again.size());
  REQUIRE(one.size() == other.size());
  for (size_t i = 0; i < one.size(); ++i) {
    CHECK(one[i].id() == again[i].id());
    CHECK(one[i].seed != other[i].seed);
    AttentionCase reseeded = other[i];
    reseeded.seed = one[i].seed;
    CHECK(reseeded.id() == one[i].id());
  }
}

TEST_CASE("attention suite: random cases fill every cell", "[verify][suite]") {
  std::map<std::tuple<std::string, std::string, bool, bool, bool>, int> cells;
  int64_t uneven_heads = 0;
  for (const AttentionCase& c : random_attention_cases({}, 1, 10000)) {
    const bool uneven =
        c.image % c.mesh.sp() != 0 || c.text % c.mesh.sp() != 0 || c.heads % c.mesh.ulysses != 0;
    ++cells[{c.mode(), dtype_name(c.dtype), c.mask != MaskKind::kNone, uneven,
             c.kv_heads < c.heads}];
    uneven_heads += c.heads % c.mesh.ulysses != 0;
  }
  CHECK(cells.size() == kModes.size() * 4 * 8);
  for (const auto& [cell, count] : cells) {
    const auto& [mode, dtype, masked, uneven, grouped] = cell;
    INFO(mode << " " << dtype << (masked ? " masked" : "") << (uneven ? " uneven" : "")
              << (grouped ? " grouped" : ""));
    CHECK(count >= 50);
  }
  CHECK(uneven_heads > 500);
}

TEST_CASE("attention suite: every case can be built", "[verify][suite]") {
  for (const auto& cases : {attention_suite({}, 1, false), random_attention_cases({}, 9, 3000)}) {
    for (const AttentionCase& c : cases) {
      INFO(c.id());
      CHECK_NOTHROW(c.make_plan());
    }
  }
}

TEST_CASE("attention suite: random cases obey the filter or say that none fits",
          "[verify][suite]") {
  CaseFilter filter;
  filter.sp = {6};
  filter.dtypes = {at::kDouble};
  const auto cases = random_attention_cases(filter, 4, 50);
  CHECK(cases.size() == 50);
  for (const AttentionCase& c : cases) {
    CHECK(c.mesh.sp() == 6);
    CHECK(c.dtype == at::kDouble);
  }
  filter.sp = {64};
  CHECK(tests::contains(tests::error_text([&] { random_attention_cases(filter, 4, 2); }),
                        "no random case fits"));
}

TEST_CASE("attention suite: goldens on every mesh that their heads allow", "[verify][suite]") {
  const AttentionGolden golden =
      load_attention_golden(SHARDPROOF_SOURCE_DIR "/datasets/goldens/attention_joint_textimage");
  const auto cases = golden_cases(golden, {}, false), quick = golden_cases(golden, {}, true);
  CHECK(modes_of(cases, 2) == possible_modes(2));
  CHECK(modes_of(cases, 4) == possible_modes(4));
  CHECK(modes_of(quick, 4).empty());
  CHECK(cases.size() == (3 + 5) * 4);
  for (const AttentionCase& c : cases) {
    CHECK(c.golden == golden.name);
    CHECK(c.text == 8);
    CHECK(c.image == 24);
    CHECK_NOTHROW(c.make_plan());
  }
  CaseFilter wide;
  wide.sp = {3, 8};  // 4 heads over 3 and over 8 ranks
  for (const AttentionCase& c : golden_cases(golden, wide, false)) CHECK_NOTHROW(c.make_plan());
}

// ---- the product passes

bool has_bitwise_pass(const CaseResult& result) {
  return std::any_of(result.checks.begin(), result.checks.end(), [](const CheckResult& check) {
    return check.name == "bitwise" && check.status == Status::kPass;
  });
}

void check_tight(const std::vector<AttentionCase>& cases) {
  const std::vector<CaseResult> results = run_cases(attention_checks(cases), {});
  int bitwise = 0;
  for (size_t i = 0; i < cases.size(); ++i) {
    const CaseResult& result = results[i];
    INFO(result.id << ": " << result.first_wrong << result.reason);
    CHECK(result.status == Status::kPass);
    REQUIRE(result.tensors.size() == 5);
    for (const TensorResult& t : result.tensors) {
      INFO(t.name << " errs by " << t.error * 1e12 << "e-12");
      CHECK(t.error <= 1e-12);
    }
    // Ulysses only moves data: even shards give the non-SP bits.
    const bool moves_only = cases[i].mesh.ring == 1 && cases[i].is_even() &&
                            cases[i].text_placement == plan::StreamPlacement::kSharded;
    CHECK(has_bitwise_pass(result) == moves_only);
    bitwise += moves_only;
  }
  CHECK(bitwise >= 5);
}

TEST_CASE("attention suite: every fp64 case of the default suite is right to 1e-12",
          "[verify][suite]") {
  CaseFilter filter;
  filter.dtypes = {at::kDouble};
  const auto cases = attention_suite(filter, 1, false);
  CHECK(cases.size() >= 190);
  check_tight(cases);
}

TEST_CASE("attention suite: 300 random fp64 cases are right to 1e-12", "[verify][suite]") {
  CaseFilter filter;
  filter.dtypes = {at::kDouble};
  check_tight(random_attention_cases(filter, 20, 300));
}

TEST_CASE("suites: a world of processes gets cases of its own size, however large", "[verify]") {
  for (const int world : {2, 5, 7, 16}) {
    CaseFilter filter;
    filter.world = world;
    for (const bool quick : {true, false}) {
      const auto attention = attention_suite(filter, 1, quick);
      const auto models = model_suite(filter, 1, quick);
      INFO("world " << world);
      CHECK(!attention.empty());
      CHECK(!models.empty());
      for (const AttentionCase& c : attention) CHECK(c.mesh.world() == world);
      for (const ModelCase& c : models) CHECK(c.mesh.world() == world);
    }
  }
}

}  // namespace
}  // namespace shardproof::verify
