// Whole models: correct runs pass, and faults between ranks are caught and named.
#include "verify/models/model_check.h"

#include "tests/catch.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <set>

#include "tests/file_support.h"
#include "verify/runner.h"
#include "verify/suites/model_suite.h"

namespace shardproof::verify {
namespace {

using tests::contains;

CaseResult check(const std::string& id, const ModelSubject& subject = {}) {
  at::set_num_threads(1);
  WorldPool worlds(sim::WorldOptions{});
  return check_model(ModelCase::parse(id), subject, worlds);
}

std::string text_of(const CaseResult& result) {
  std::string text = result.id + ": " + result.reason + " first wrong: " + result.first_wrong;
  for (const CheckResult& c : result.checks) {
    if (c.status != Status::kPass) text += "\n" + c.name + ": " + c.detail;
  }
  return text;
}

bool wrong(const CaseResult& result, const std::string& tensor) {
  for (const TensorResult& t : result.tensors) {
    if (t.name == tensor) return t.status == Status::kFail;
  }
  FAIL("no tensor " + tensor + " in " + result.id);
  return false;
}

// Runs forward and backward of two blocks, in a mode where every block talks.
const char* const kSubjects[][2] = {
    {"qwenimage", "transformer_blocks"},
    {"qwenimage_edit", "transformer_blocks"},
    {"flux", "transformer_blocks"},
    {"sd3", "transformer_blocks"},
    {"wan", "blocks"},
};

TEST_CASE("model check: tensors come in program order", "[verify][models]") {
  const CaseResult result = check("models/qwenimage/ulysses/ulysses2/fp64/ragged");
  INFO(text_of(result));
  CHECK(result.status == Status::kPass);
  REQUIRE(result.tensors.size() == 85);
  CHECK(result.tensors[0].name == "block.0.encoder_hidden_states");
  CHECK(result.tensors[4].name == "output");
  CHECK(result.tensors[5].name == "proj_out.bias:grad");
  CHECK(result.tensors.back().name == "timestep:grad");
}

TEST_CASE("model check: what dies between two blocks is named after the block",
          "[verify][models]") {
  for (const auto& [subject, blocks] : kSubjects) {
    ModelSubject faulty;
    sim::Fault fault;
    fault.tag = std::string(blocks) + ".1/*qkv*";
    fault.factor = 1.001;
    fault.rank = 1;
    faulty.faults = {fault};
    const CaseResult result =
        check(std::string("models/") + subject + "/ulysses/ulysses2/fp64/default", faulty);
    INFO(text_of(result));
    CHECK(result.status == Status::kFail);
    CHECK(contains(result.first_wrong, "block.1."));
  }
}

TEST_CASE("model check: a gradient that is scaled on its way back", "[verify][models]") {
  for (const char* dtype : {"fp64", "fp32", "bf16", "fp16"}) {
    ModelSubject faulty;
    sim::Fault fault;
    fault.tag = "transformer_blocks.0/*'";
    fault.factor = std::string(dtype) == "bf16" ? 0.5 : 0.9;
    faulty.faults = {fault};
    const CaseResult result =
        check(std::string("models/qwenimage/ulysses/ulysses4/") + dtype + "/ragged", faulty);
    INFO(text_of(result));
    CHECK(result.status == Status::kFail);
    CHECK(contains(result.first_wrong, ":grad"));
    CHECK(!wrong(result, "output"));
    CHECK(!wrong(result, "transformer_blocks.1.img_mlp.net.2.weight:grad"));
  }
}

TEST_CASE("model check: ranks that disagree about an input", "[verify][models]") {
  const auto with = [](const char* id, std::function<void(models::TransformerInputs&)> edit) {
    ModelSubject faulty;
    faulty.edit_inputs = [=](models::TransformerInputs& in, int rank) {
      if (rank == 1) edit(in);
    };
    return check(id, faulty);
  };
  SECTION("the timestep") {
    const CaseResult result = with("models/flux/ring/ring2/fp32/default",
                                   [](auto& in) { in.timestep = in.timestep * 1.01; });
    INFO(text_of(result));
    CHECK(result.status == Status::kFail);
    CHECK(result.first_wrong == "block.0.encoder_hidden_states");
  }
  SECTION("the mask") {
    const CaseResult result = with("models/qwenimage/ring/ring2/bf16/ragged", [](auto& in) {
      in.encoder_hidden_states_mask = at::ones_like(in.encoder_hidden_states_mask);
    });
    INFO(text_of(result));
    CHECK(result.status == Status::kFail);
  }
  SECTION("positions of the image tokens") {
    const CaseResult result = with("models/flux/ulysses/ulysses2/bf16/default",
                                   [](auto& in) { in.img_ids = in.img_ids.flip(0); });
    INFO(text_of(result));
    CHECK(result.status == Status::kFail);
    CHECK(result.first_wrong == "block.0.encoder_hidden_states");
  }
}

TEST_CASE("model check: a gather that slices where it must sum", "[verify][models]") {
  ModelSubject faulty;
  faulty.edit_options = [](models::ParallelOptions& options, int) {
    options.convention = plan::GradientConvention::kSliceThenScaleLoss;
  };
  const CaseResult result = check("models/wan/ulysses/ulysses2/fp32/default", faulty);
  INFO(text_of(result));
  CHECK(result.status == Status::kFail);
  CHECK(result.first_wrong == "scale_shift_table:grad");
}

TEST_CASE("model check: every gradient convention gives the gradient", "[verify][models]") {
  for (const char* convention : {"A", "B", "C"}) {
    const CaseResult result =
        check(std::string("models/sd3/hybrid/ring2.ulysses2/fp64/textrep.") + convention);
    INFO(text_of(result));
    CHECK(result.status == Status::kPass);
  }
}

TEST_CASE("model check: a recomputed block that talks otherwise", "[verify][models]") {
  ModelSubject faulty;
  sim::Fault fault;  // the recomputation gets other numbers than the forward
  fault.tag = "*~";
  fault.factor = 1.01;
  faulty.faults = {fault};
  const CaseResult result = check("models/flux/ulysses/ulysses2/fp64/recompute", faulty);
  INFO(text_of(result));
  CHECK(result.status == Status::kFail);
  CHECK(!wrong(result, "output"));
  CHECK(contains(result.first_wrong, ":grad"));
}

TEST_CASE("model check: goldens are the oracle in fp64 and fp32", "[verify][models]") {
  std::map<std::string, ModelGolden> goldens;
  std::vector<ModelCase> cases;
  for (const char* name :
       {"qwenimage_mask", "qwenimage_nomask", "qwenimage_edit", "flux_dev", "sd35", "wan"}) {
    const auto it =
        goldens
            .emplace(name, load_model_golden(SHARDPROOF_SOURCE_DIR "/datasets/goldens/" +
                                             std::string(name)))
            .first;
    const auto more = golden_model_cases(it->second, {}, false);
    cases.insert(cases.end(), more.begin(), more.end());
  }
  for (const CaseResult& result : run_cases(model_checks(cases, goldens), {})) {
    INFO(text_of(result));
    CHECK(result.status == Status::kPass);
    if (!contains(result.id, "/fp64/")) continue;
    for (const TensorResult& t : result.tensors) CHECK(t.error <= 1e-12);
  }
}

TEST_CASE("model check: diffusers' numbers notice another epsilon", "[verify][models]") {
  // 1e-5 for 1e-6 changes outputs by a few 1e-6: only a comparison in fp64 sees it.
  ModelGolden golden = load_model_golden(SHARDPROOF_SOURCE_DIR "/datasets/goldens/wan");
  golden.expected["output"] = golden.expected["output"] * (1 + 2e-12);
  const ModelCase c = golden_model_cases(golden, {}, true)[0];
  WorldPool worlds(sim::WorldOptions{});
  const CaseResult result = check_model(c, {}, worlds, &golden);
  CHECK(result.status == Status::kFail);
  CHECK(result.first_wrong == "output");
}

TEST_CASE("model check: what cannot be built is a skip", "[verify][models]") {
  const CaseResult result = check("models/flux/ulysses/ulysses3/fp64/default");
  CHECK(result.status == Status::kSkip);
  CHECK(contains(result.reason, "heads"));
}

}  // namespace
}  // namespace shardproof::verify
