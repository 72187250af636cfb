// Damaged goldens of models are errors that name all problems, never a pass or a failure.
#include "verify/models/model_golden.h"

#include "tests/catch.h"

#include <ATen/ATen.h>

#include <limits>

#include "io/safetensors.h"
#include "tests/file_support.h"

namespace shardproof::verify {
namespace {

namespace fs = std::filesystem;
using tests::contains;
using tests::error_text;
using tests::TempFolder;

const fs::path kWan = SHARDPROOF_SOURCE_DIR "/datasets/goldens/wan";

// A copy of a real golden whose tensors can be changed.
class Copy {
 public:
  Copy() { fs::copy(kWan, folder(), fs::copy_options::recursive); }
  fs::path folder() const { return temp_ / "wan"; }
  void edit(const char* file,
            const std::function<void(std::map<std::string, at::Tensor>&)>& change) {
    std::map<std::string, at::Tensor> tensors;
    {
      const auto opened = SafetensorsFile::open(folder() / file);
      for (const SafetensorsEntry& entry : opened.entries()) {
        tensors[entry.name] = opened.tensor(entry.name).clone();
      }
    }
    change(tensors);
    save_safetensors(folder() / file, tensors);
  }
  std::string error() const {
    return error_text([&] { load_model_golden(folder()); });
  }

 private:
  TempFolder temp_;
};

TEST_CASE("model golden: a real one", "[golden]") {
  const ModelGolden golden = load_model_golden(kWan);
  CHECK(golden.name == "wan");
  CHECK(golden.model->class_name() == "WanTransformer3DModel");
  CHECK(golden.image_tokens == 48);
  CHECK(golden.text_tokens == 8);
  CHECK(golden.heads == 4);
  CHECK(golden.expected.at("output").sizes() == golden.cotangent.sizes());
  CHECK(golden.fp32_parameter_grad > 1e-6);
}

TEST_CASE("model golden: missing and misshapen tensors are listed together", "[golden]") {
  Copy copy;
  copy.edit("expected.safetensors", [](auto& t) {
    t.erase("grad.param.proj_out.bias");
    t["grad.input.hidden_states"] = t["grad.input.hidden_states"].flatten();
  });
  const std::string text = copy.error();
  CHECK(contains(text, "2 problems"));
  CHECK(contains(text, "\"grad.param.proj_out.bias\" is missing"));
  CHECK(contains(text, "\"grad.input.hidden_states\" has shape [1536]; expected [2, 4, 2, 8, 12]"));
}

TEST_CASE("model golden: values that are not finite, a loss that is not the output's", "[golden]") {
  SECTION("expected") {
    Copy copy;
    copy.edit("expected.safetensors",
              [](auto& t) { t["output"].fill_(std::numeric_limits<double>::quiet_NaN()); });
    CHECK(contains(copy.error(), "\"output\": expected finite F64 values"));
  }
  SECTION("inputs") {
    Copy copy;
    copy.edit("inputs.safetensors",
              [](auto& t) { t["hidden_states"].fill_(std::numeric_limits<float>::infinity()); });
    CHECK(contains(copy.error(), "\"hidden_states\" has values that are not finite"));
  }
  SECTION("loss") {
    Copy copy;
    copy.edit("expected.safetensors", [](auto& t) { t["loss"] = t["loss"] + 1e-6; });
    CHECK(contains(copy.error(), "sum(output * cotangent)"));
  }
  SECTION("an unknown input") {
    Copy copy;
    copy.edit("inputs.safetensors", [](auto& t) { t["hidden"] = at::zeros({1}); });
    CHECK(contains(copy.error(), "'hidden'"));
  }
}

TEST_CASE("model golden: a model that cannot be loaded", "[golden]") {
  Copy copy;
  copy.edit("model.safetensors", [](auto& t) { t.erase("proj_out.bias"); });
  CHECK(contains(copy.error(), "\"proj_out.bias\" is missing"));
}

TEST_CASE("model golden: other folders", "[golden]") {
  CHECK(contains(error_text([] {
                   load_model_golden(SHARDPROOF_SOURCE_DIR "/datasets/goldens/attention_keymask");
                 }),
                 "is of kind \"attention\"; expected \"model\""));
  CHECK(contains(error_text([] { load_model_golden("/nowhere"); }), "is not a golden"));
}

}  // namespace
}  // namespace shardproof::verify
