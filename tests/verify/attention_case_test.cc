// Case ids: they hold everything, are stable, and what cannot be read is refused with a reason.
#include "verify/attention/attention_case.h"

#include "tests/catch.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <set>

#include "tests/file_support.h"
#include "verify/dtype.h"
#include "verify/suites/attention_suite.h"

namespace shardproof::verify {
namespace {

using plan::GradientConvention;
using plan::StreamPlacement;
using tests::contains;
using tests::error_text;

// The convention plays a part only where text is replicated, and only there an id holds it.
bool same(const AttentionCase& a, const AttentionCase& b) {
  return a.suite == b.suite && a.golden == b.golden && a.mesh == b.mesh && a.dtype == b.dtype &&
         a.batch == b.batch && a.text == b.text && a.image == b.image && a.heads == b.heads &&
         a.kv_heads == b.kv_heads && a.head_dim == b.head_dim && a.mask == b.mask &&
         a.text_placement == b.text_placement && a.token_split == b.token_split &&
         a.head_split == b.head_split &&
         (a.ring_mode == b.ring_mode || (a.mesh.ring == 1 && b.mesh.ring == 1)) &&
         (a.convention == b.convention || a.text_placement == StreamPlacement::kSharded) &&
         a.strided == b.strided && a.backend == b.backend && a.seed == b.seed;
}

void check_round_trip(const std::vector<AttentionCase>& cases) {
  std::set<std::string> ids;
  for (const AttentionCase& c : cases) {
    INFO(c.id());
    const AttentionCase parsed = AttentionCase::parse(c.id());
    CHECK(parsed.id() == c.id());
    CHECK(same(parsed, c));
    CHECK(ids.insert(c.id()).second);  // no two cases share an id
  }
}

TEST_CASE("attention case: ids of the suites can be read back", "[verify][case]") {
  for (const char* backend : {"auto", "math"}) {
    CaseFilter filter;
    filter.backend = backend;
    check_round_trip(attention_suite(filter, 1, /*quick=*/false));
    check_round_trip(attention_suite(filter, 7, /*quick=*/true));
    check_round_trip(random_attention_cases(filter, 3, 2000));
  }
}

TEST_CASE("attention case: ids of goldens can be read back", "[verify][case]") {
  int cases = 0;
  for (const auto& folder : find_goldens(SHARDPROOF_SOURCE_DIR "/datasets/goldens")) {
    if (golden_kind(folder) != "attention") continue;
    CaseFilter filter;
    filter.sp = {1, 2, 3, 4, 8};
    for (const AttentionCase& c : golden_cases(load_attention_golden(folder), filter, false)) {
      INFO(c.id());
      const AttentionCase parsed = AttentionCase::parse(c.id());
      CHECK(parsed.id() == c.id());
      // Sizes are the golden's and not in the id.
      CHECK(parsed.golden == folder.filename().string());
      CHECK(parsed.mesh == c.mesh);
      CHECK(parsed.dtype == c.dtype);
      CHECK(parsed.mode() == c.mode());
      CHECK(parsed.head_split == c.head_split);
      ++cases;
    }
  }
  CHECK(cases > 100);
}

TEST_CASE("attention case: the example of the header", "[verify][case]") {
  const std::string id =
      "attention/joint/hybrid/dp1.ring2.ulysses2/bf16/b2.t8.i24.h4.kv4.d16.ragged.textrep.C#17";
  const AttentionCase c = AttentionCase::parse(id);
  CHECK(c.id() == id);
  CHECK(c.mesh == comm::MeshShape{1, 2, 2});
  CHECK(c.dtype == c10::ScalarType::BFloat16);
  CHECK(c.batch == 2);
  CHECK(c.text == 8);
  CHECK(c.image == 24);
  CHECK(c.heads == 4);
  CHECK(c.head_dim == 16);
  CHECK(c.mask == MaskKind::kRagged);
  CHECK(c.text_placement == StreamPlacement::kReplicated);
  CHECK(c.convention == GradientConvention::kSumThenSlice);
  CHECK(c.seed == 17);
}

TEST_CASE("attention case: a short id has defaults", "[verify][case]") {
  const AttentionCase c =
      AttentionCase::parse("attention/joint/hybrid/dp1.ring2.ulysses2/bf16/ragged#17");
  CHECK(c.id() == "attention/joint/hybrid/dp1.ring2.ulysses2/bf16/b2.t8.i24.h4.kv4.d16.ragged#17");
  CHECK(same(c, AttentionCase::parse(c.id())));

  const AttentionCase plain = AttentionCase::parse("attention/self/local/dp1/fp64/default");
  CHECK(plain.id() == "attention/self/local/dp1.ring1.ulysses1/fp64/b2.t0.i24.h4.kv4.d16#1");
  // Without a word of their own, KV heads are as many as query heads.
  CHECK(AttentionCase::parse("attention/self/local/dp1/fp64/h6").kv_heads == 6);
  CHECK(AttentionCase::parse("attention/self/local/dp1/fp64/kv3.h6").kv_heads == 3);
}

TEST_CASE("attention case: every word does what it says", "[verify][case]") {
  const auto with = [](const std::string& words) {
    return AttentionCase::parse("attention/joint/ulysses/dp2.ulysses2/fp32/" + words);
  };
  struct Word {
    const char* word;
    std::function<bool(const AttentionCase&)> holds;
  };
  const std::vector<Word> words = {
      {"b5", [](const auto& c) { return c.batch == 5; }},
      {"t3", [](const auto& c) { return c.text == 3; }},
      {"i11", [](const auto& c) { return c.image == 11; }},
      {"h12", [](const auto& c) { return c.heads == 12; }},
      {"kv2", [](const auto& c) { return c.kv_heads == 2; }},
      {"d20", [](const auto& c) { return c.head_dim == 20; }},
      {"ragged", [](const auto& c) { return c.mask == MaskKind::kRagged; }},
      {"scattered", [](const auto& c) { return c.mask == MaskKind::kScattered; }},
      {"onekey", [](const auto& c) { return c.mask == MaskKind::kOneKey; }},
      {"emptyrank", [](const auto& c) { return c.mask == MaskKind::kEmptyRank; }},
      {"textrep", [](const auto& c) { return c.text_placement == StreamPlacement::kReplicated; }},
      {"tokenpad", [](const auto& c) { return c.token_split == plan::TokenSplit::kPadded; }},
      {"headuneven", [](const auto& c) { return c.head_split == plan::HeadSplit::kUneven; }},
      {"headpad", [](const auto& c) { return c.head_split == plan::HeadSplit::kPadded; }},
      {"A", [](const auto& c) { return c.convention == GradientConvention::kSliceThenScaleLoss; }},
      {"B", [](const auto& c) { return c.convention == GradientConvention::kSliceTimesSp; }},
      {"A.C", [](const auto& c) { return c.convention == GradientConvention::kSumThenSlice; }},
      {"strided", [](const auto& c) { return c.strided; }},
      {"@math", [](const auto& c) { return c.backend == "math"; }},
  };
  std::vector<std::string> spellings;
  for (const Word& w : words) {
    INFO(w.word);
    const bool is_default = std::string_view(w.word) == "A.C";
    CHECK(w.holds(with(w.word)));
    CHECK(w.holds(with("default")) == is_default);
    // And it is in the message that lists what is known.
    const std::string known = error_text([&] { with("wordless"); });
    if (is_default) continue;
    std::string spelled(w.word);
    if (spelled[0] != '@') spelled.erase(spelled.find_last_not_of("0123456789") + 1);
    CHECK(contains(known, spelled[0] == '@' ? "@<backend>" : spelled));
    spellings.emplace_back(w.word);
  }
  // Any order; of contradicting words the last one counts.
  CHECK(with("t3.headpad.ragged.B.h6.textrep").id() == with("textrep.h6.B.ragged.headpad.t3").id());
  CHECK(with(fmt::format("{}", fmt::join(spellings, "."))).mask == MaskKind::kEmptyRank);
  std::reverse(spellings.begin(), spellings.end());
  CHECK(with(fmt::format("{}", fmt::join(spellings, "."))).mask == MaskKind::kRagged);
}

TEST_CASE("attention case: the mode is what the mesh makes of it", "[verify][case]") {
  for (const auto& [mode, mesh] :
       {std::pair("local", "dp2"), std::pair("ulysses", "ulysses4"), std::pair("ring", "ring3"),
        std::pair("allgather", "ring3"), std::pair("hybrid", "ring2.ulysses2"),
        std::pair("hybrid_allgather", "ring2.ulysses2")}) {
    const AttentionCase c =
        AttentionCase::parse(fmt::format("attention/self/{}/{}/fp16/default", mode, mesh));
    CHECK(c.mode() == mode);
    CHECK((c.ring_mode == plan::RingMode::kAllGather) ==
          std::string_view(mode).ends_with("allgather"));
  }
}

TEST_CASE("attention case: what cannot be read is refused", "[verify][case]") {
  struct Bad {
    const char* id;
    std::vector<const char*> words;
  };
  const std::vector<Bad> all = {
      {"", {"<suite>/<subject>/<mode>/<mesh>/<dtype>/<variant>[#seed]"}},
      {"attention/self/ring/ring2/fp32", {"expected <suite>/<subject>"}},
      {"attention/self/ring/ring2/fp32/default/more", {"expected <suite>/<subject>"}},
      {"models/self/ring/ring2/fp32/default", {"suite attention or goldens"}},
      {"attention/cross/ring/ring2/fp32/default", {"subject self or joint"}},
      {"attention/self/rings/ring2/fp32/default", {"mode 'rings'", "dp1.ring2.ulysses1", "'ring'"}},
      {"attention/self/ulysses/ring2/fp32/default", {"mode 'ulysses'", "'ring'"}},
      {"attention/self/local/ring2/fp32/default", {"mode 'local'"}},
      {"attention/self/allgather/ulysses2/fp32/default", {"mode 'allgather'", "'ulysses'"}},
      {"attention/self/ring/ring0/fp32/default", {"ring0", "at least 1"}},
      {"attention/self/ring/rings2/fp32/default", {"rings2"}},
      {"attention/self/ring/ring2/fp8/default", {"'fp8'", "fp64, fp32, bf16 or fp16"}},
      {"attention/self/ring/ring2/fp32/raged", {"unknown word 'raged'", "ragged"}},
      {"attention/self/ring/ring2/fp32/b", {"unknown word 'b'"}},
      {"attention/self/ring/ring2/fp32/b2x", {"unknown word 'b2x'"}},
      {"attention/self/ring/ring2/fp32/i99999999999999999999", {"unknown word 'i999"}},
      {"attention/self/ring/ring2/fp32/b0", {"at least one sample, token and channel"}},
      {"attention/self/ring/ring2/fp32/i0", {"at least one sample, token and channel"}},
      {"attention/self/ring/ring2/fp32/i-3", {"at least one sample, token and channel"}},
      {"attention/self/ring/ring2/fp32/d0", {"at least one sample, token and channel"}},
      {"attention/self/ring/ring2/fp32/t4", {"subject self with 4 text tokens"}},
      {"attention/joint/ring/ring2/fp32/t0", {"subject joint with 0 text tokens"}},
      {"attention/self/ring/ring2/fp32/default#", {"bad seed"}},
      {"attention/self/ring/ring2/fp32/default#x", {"bad seed"}},
      {"attention/self/ring/ring2/fp32/default#-1", {"bad seed"}},
      {"attention/self/ring/ring2/fp32/default#1.5", {"bad seed"}},
  };
  for (const Bad& bad : all) {
    INFO(bad.id);
    const std::string text = error_text([&] { AttentionCase::parse(bad.id); });
    for (const char* word : bad.words) {
      INFO(text << " should hold: " << word);
      CHECK(contains(text, word));
    }
  }
}

TEST_CASE("attention case: only what divides in every way is even", "[verify][case]") {
  const auto even = [](const char* mode, const char* words) {
    return AttentionCase::parse(fmt::format("attention/{}/fp32/{}", mode, words)).is_even();
  };
  CHECK(even("joint/ulysses/ulysses4", "t8.i12.h4"));
  CHECK(even("joint/ulysses/ulysses4", "t8.i12.h8.kv4"));
  CHECK(even("self/hybrid/ring2.ulysses2", "i12.h2"));
  CHECK(!even("joint/ulysses/ulysses4", "t7.i12.h4"));
  CHECK(!even("joint/ulysses/ulysses4", "t8.i13.h4"));
  CHECK(!even("joint/ulysses/ulysses4", "t8.i12.h5"));
  CHECK(!even("joint/ulysses/ulysses4", "t8.i12.h8.kv2"));
  CHECK(!even("self/hybrid/ring2.ulysses2", "i10.h2"));
}

}  // namespace
}  // namespace shardproof::verify
