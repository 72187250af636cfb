// Golden folders of models: diffusers' configuration, weights, inputs and its results in float64
// (format: datasets/goldens/README.md).
#pragma once
#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <memory>
#include <string>

#include "models/transformer.h"

namespace shardproof::verify {

struct ModelGolden {
  std::string name;              // the folder's name
  std::filesystem::path folder;  // absolute
  std::shared_ptr<const models::Transformer> model;
  models::ParameterSet parameters;        // fp32
  models::TransformerInputs inputs = {};  // fp32
  at::Tensor cotangent = {};              // fp32, like the output
  // fp64 by name: output, loss, grad.input.<name>, grad.param.<name>, block.<i>.hidden_states, ...;
  // alt.sinusoid_float32.output.
  std::map<std::string, at::Tensor> expected = {};
  int64_t text_tokens = 0, image_tokens = 0, heads = 0;
  // Relative L2 errors of diffusers' own float32 run.
  double fp32_output = 0, fp32_parameter_grad = 0, fp32_input_grad = 0;
};

// Errors: one Error of kind kBadInput that lists all problems of the folder: a model that cannot be
// loaded, missing or damaged files, tensors that are missing, of wrong shape or not finite, a loss
// that is not sum(output * cotangent) to 1e-9.
ModelGolden load_model_golden(const std::filesystem::path& folder);

}  // namespace shardproof::verify
