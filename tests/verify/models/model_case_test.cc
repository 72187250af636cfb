// Ids of model cases hold everything, and refuse what makes no sense.
#include "verify/models/model_case.h"

#include "tests/file_support.h"
#include "verify/suites/model_suite.h"

namespace shardproof::verify {
namespace {

using tests::contains;
using tests::error_text;

TEST_CASE("model case: an id reads back as itself", "[verify][models]") {
  const std::string id =
      "models/qwenimage/hybrid_allgather/dp2.ring2.ulysses2/bf16/"
      "b3.t7.g1x5x3.l3.h6.d8.ragged.cfg.textalign.lora.recompute.faithful.textrep.tokenpad."
      "headuneven.B.@math#42";
  CHECK(ModelCase::parse(id).id() == id);
  const std::string dropped =
      "models/flux/ulysses/dp2.ring1.ulysses2/fp64/b1.t7.g1x5x3.l1.h2.d8.recompute.drop#42";
  CHECK(ModelCase::parse(dropped).id() == dropped);
  CHECK(ModelCase::parse(dropped).dropout);
  for (const ModelCase& c : model_suite({}, 7, false))
    CHECK(ModelCase::parse(c.id()).id() == c.id());
}

TEST_CASE("model case: what is not said has the subject's default", "[verify][models]") {
  const ModelCase wan = ModelCase::parse("models/wan/ring/ring2/fp32/default");
  CHECK(wan.id() == "models/wan/ring/dp1.ring2.ulysses1/fp32/b2.t8.g2x3x4.l2.h4.d12#1");
  const ModelCase flux = ModelCase::parse("models/flux/local/ulysses1/fp64/t3");
  CHECK(flux.text == 3);
  CHECK(flux.image_tokens() == 24);
}

TEST_CASE("model case: 16 bits always cast where diffusers casts", "[verify][models]") {
  CHECK(ModelCase::parse("models/flux/local/ulysses1/bf16/t3").policy() ==
        models::DtypePolicy::kFaithful);
  CHECK(ModelCase::parse("models/flux/local/ulysses1/fp32/t3").policy() ==
        models::DtypePolicy::kReference);
  CHECK(ModelCase::parse("models/flux/local/ulysses1/fp32/faithful").policy() ==
        models::DtypePolicy::kFaithful);
}

TEST_CASE("model case: mistakes are named", "[verify][models]") {
  const auto mistake = [](const char* id) { return error_text([&] { ModelCase::parse(id); }); };
  CHECK(contains(mistake("models/qwen/local/ulysses1/fp64/t3"),
                 "unknown model 'qwen'; known: qwenimage"));
  CHECK(contains(mistake("models/flux/ring/ulysses2/fp64/t3"), "which makes it 'ulysses'"));
  CHECK(contains(mistake("models/flux/local/ulysses1/fp64/x3"), "unknown word 'x3'"));
  CHECK(contains(mistake("models/flux/local/ulysses1/fp64/g4x6"), "unknown word 'g4x6'"));
  CHECK(contains(mistake("models/flux/local/ulysses1/fp64/ragged"),
                 "only qwenimage takes a text mask"));
  CHECK(contains(mistake("models/qwenimage/ulysses/ulysses2/fp64/drop.textalign"),
                 "drop: masks are drawn for the text as it is, which textalign lengthens"));
  CHECK(contains(mistake("goldens/flux/ulysses/ulysses2/fp64/drop"), "without dropout"));
  CHECK(contains(mistake("models/sd3/local/ulysses1/fp64/g2x3x3"), "only wan has frames"));
  CHECK(contains(mistake("models/sd3/local/ulysses1/fp64/d6"), "multiples of 4"));
  CHECK(contains(mistake("models/sd3/local/ulysses1/fp64/f64"), "wan's feed-forward"));
  CHECK(ModelCase::parse("models/wan/local/ulysses1/fp64/f64").ffn == 64);
  CHECK(contains(mistake("models/sd3/local/ulysses1/fp64/t0"), "at least one sample, token"));
  CHECK(contains(mistake("attention/self/local/ulysses1/fp64/t3"), "suite models or goldens"));
  CHECK(contains(mistake("models/sd3/ulysses/ulysses1024/fp64/t3"), "up to 512 ranks"));
}

}  // namespace
}  // namespace shardproof::verify
