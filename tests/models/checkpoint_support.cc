#include "tests/models/checkpoint_support.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

namespace shardproof::tests {

JsonValue tiny_config() {
  return parse_json(R"({"_class_name": "QwenImageTransformer2DModel", "num_layers": 2,
                        "attention_head_dim": 8, "num_attention_heads": 2, "in_channels": 8,
                        "out_channels": 2, "joint_attention_dim": 12,
                        "axes_dims_rope": [2, 2, 4]})",
                    "tiny");
}

models::ParameterSet tiny_parameters(uint64_t seed, at::ScalarType dtype) {
  models::ParameterSet parameters(models::make_transformer(tiny_config())->parameter_specs());
  at::Generator random = at::make_generator<at::CPUGeneratorImpl>(seed);
  const auto specs = parameters.specs();
  for (const models::ParameterSpec& spec : specs) {
    parameters.set(spec.name, at::empty(spec.shape, at::kDouble).normal_(0, 0.1, random).to(dtype));
  }
  return parameters;
}

at::Tensor run_tiny(const models::ParameterSet& parameters) {
  at::Generator random = at::make_generator<at::CPUGeneratorImpl>(7);
  models::TransformerInputs in;
  in.hidden_states = at::empty({2, 6, 8}, at::kDouble).normal_(0, 1, random);
  in.encoder_hidden_states = at::empty({2, 4, 12}, at::kDouble).normal_(0, 1, random);
  in.timestep = at::tensor({0.25, 0.75}, at::kDouble);
  in.img_shapes = {{{1, 2, 3}}, {{1, 2, 3}}};
  models::SingleRank rank(at::kCPU);
  const comm::Mesh mesh(rank, {});
  return models::make_transformer(tiny_config())
      ->forward(parameters, in, models::MeshContext(mesh, {}), {});
}

Tensors to_map(const models::ParameterSet& parameters) {
  Tensors all;
  for (const models::ParameterSpec& spec : parameters.specs()) {
    all[spec.name] = parameters[spec.name];
  }
  return all;
}

void check_same(const models::ParameterSet& a, const models::ParameterSet& b) {
  REQUIRE(a.specs().size() == b.specs().size());
  for (const models::ParameterSpec& spec : a.specs()) {
    INFO(spec.name);
    REQUIRE(b.contains(spec.name));
    CHECK(a[spec.name].scalar_type() == b[spec.name].scalar_type());
    CHECK(at::equal(a[spec.name], b[spec.name]));
  }
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  INFO(from);
  REQUIRE(at != std::string::npos);
  return text.replace(at, from.size(), to);
}

}  // namespace shardproof::tests
