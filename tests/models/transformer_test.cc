// The four models refuse configurations and inputs that they cannot serve, with all problems named.
#include "models/transformer.h"

#include "tests/catch.h"

#include <ATen/ATen.h>

#include "tests/file_support.h"

namespace shardproof::models {
namespace {

using tests::contains;
using tests::error_text;

std::string config_error(const std::string& text) {
  return error_text([&] { make_transformer(parse_json(text, "config.json")); });
}

TEST_CASE("transformer: an unknown class", "[models]") {
  const std::string text = config_error(R"({"_class_name":"UNet2DConditionModel"})");
  CHECK(contains(text, "_class_name is \"UNet2DConditionModel\""));
  CHECK(contains(text, "known: QwenImageTransformer2DModel, FluxTransformer2DModel"));
  CHECK(contains(config_error("{}"), "_class_name"));
}

TEST_CASE("transformer: all problems of a configuration at once", "[models]") {
  const std::string text = config_error(
      R"({"_class_name":"QwenImageTransformer2DModel","guidance_embeds":true,"heads":3,
          "num_layers":-1,"axes_dims_rope":[1,2]})");
  CHECK(contains(text, "4 problems"));
  CHECK(contains(text, "guidance_embeds is true; only false is supported"));
  CHECK(contains(text, "\"heads\": a key that this model does not know"));
  CHECK(contains(text, "num_layers is -1"));
  CHECK(contains(text, "axes_dims_rope must be three numbers"));
}

TEST_CASE("transformer: what other versions of the models need is refused", "[models]") {
  CHECK(contains(config_error(R"({"_class_name":"SD3Transformer2DModel","qk_norm":null,
                                  "caption_projection_dim":1152})"),
                 "only qk_norm = rms_norm (SD3.5) is supported"));
  CHECK(contains(config_error(R"({"_class_name":"WanTransformer3DModel","image_dim":1280})"),
                 "image_dim is 1280"));
  CHECK(contains(config_error(R"({"_class_name":"WanTransformer3DModel","qk_norm":"layer"})"),
                 "qk_norm is \"layer\""));
}

// forward() of a tiny model on one rank, for its error.
std::string input_error(const std::string& config, const TransformerInputs& inputs) {
  const auto model = make_transformer(parse_json(config, "config.json"));
  ParameterSet parameters(model->parameter_specs());
  parameters.allocate(at::TensorOptions(at::kFloat));
  for (const ParameterSpec& spec : model->parameter_specs()) {
    parameters.set(spec.name, at::zeros(spec.shape));
  }
  SingleRank single(at::kCPU);
  const comm::Mesh mesh(single, {});
  const MeshContext parallel(mesh, {});
  return error_text([&] { model->forward(parameters, inputs, parallel, {}); });
}

const char* const kFlux =
    R"({"_class_name":"FluxTransformer2DModel","attention_head_dim":8,"axes_dims_rope":[2,2,4],
        "in_channels":4,"joint_attention_dim":6,"num_attention_heads":2,"num_layers":1,
        "num_single_layers":1,"pooled_projection_dim":5,"guidance_embeds":true})";

TransformerInputs flux_inputs() {
  TransformerInputs in;
  in.hidden_states = at::zeros({1, 4, 4});
  in.encoder_hidden_states = at::zeros({1, 3, 6});
  in.pooled_projections = at::zeros({1, 5});
  in.timestep = at::zeros({1});
  in.guidance = at::zeros({1});
  in.img_ids = at::zeros({4, 3});
  in.txt_ids = at::zeros({3, 3});
  return in;
}

TEST_CASE("transformer: inputs that are missing or do not fit", "[models]") {
  TransformerInputs in = flux_inputs();
  in.guidance = at::Tensor();
  CHECK(contains(input_error(kFlux, in), "guidance must be given"));
  in = flux_inputs();
  in.img_ids = at::zeros({5, 3});
  CHECK(contains(input_error(kFlux, in), "img_ids and txt_ids must be [tokens,3]"));
  in = flux_inputs();
  in.encoder_hidden_states_mask = at::ones({1, 3}, at::kBool);
  CHECK(contains(input_error(kFlux, in), "what to do with input 'encoder_hidden_states_mask'"));
  for (const auto& name :
       {"hidden_states", "encoder_hidden_states", "pooled_projections", "timestep"}) {
    in = flux_inputs();
    in[name] = at::Tensor();
    INFO(name);
    CHECK(contains(input_error(kFlux, in), name));
  }
}

TEST_CASE("transformer: QwenImage's samples share their image shapes", "[models]") {
  const char* config =
      R"({"_class_name":"QwenImageTransformer2DModel","attention_head_dim":8,
          "axes_dims_rope":[2,2,4],"in_channels":4,"joint_attention_dim":6,
          "num_attention_heads":2,"num_layers":1})";
  TransformerInputs in;
  in.hidden_states = at::zeros({2, 6, 4});
  in.encoder_hidden_states = at::zeros({2, 3, 6});
  in.timestep = at::zeros({2});
  CHECK(contains(input_error(config, in), "img_shapes"));
  in.img_shapes = {{{1, 2, 2}}, {{1, 2, 2}}};
  CHECK(contains(input_error(config, in), "hold 4 tokens; hidden_states has 6"));
  in.img_shapes = {{{1, 2, 3}}, {{1, 3, 2}}};
  CHECK(contains(input_error(config, in), "same img_shapes"));
}

TEST_CASE("transformer: latents that patches do not divide", "[models]") {
  const char* wan =
      R"({"_class_name":"WanTransformer3DModel","attention_head_dim":12,"in_channels":4,
          "out_channels":4,"text_dim":6,"num_attention_heads":2,"num_layers":1,"ffn_dim":8})";
  TransformerInputs in;
  in.hidden_states = at::zeros({1, 4, 2, 5, 4});
  in.encoder_hidden_states = at::zeros({1, 3, 6});
  in.timestep = at::zeros({1});
  CHECK(contains(input_error(wan, in), "[1, 4, 2, 5, 4]"));
  in.hidden_states = at::zeros({1, 4, 4});
  CHECK(contains(input_error(wan, in), "expected 5 dimensions"));
}

}  // namespace
}  // namespace shardproof::models
