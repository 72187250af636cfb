// The model, weights, inputs and cotangents of a model case, drawn from its seed or a golden's.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "models/transformer.h"
#include "verify/models/model_case.h"
#include "verify/models/model_golden.h"

namespace shardproof::verify {

// One call of the model in the loss; the loss reads sum over passes of weight * output.
struct ModelPass {
  double weight = 1;
  models::TransformerInputs inputs;  // whole: all replicas' samples together
  std::string prefix;                // of the names of inputs that only this pass has
  models::Dropout dropout;           // in cases with `drop`
};

struct ModelData {
  std::shared_ptr<const models::Transformer> model;
  models::ParameterSet parameters;  // values in fp64, rounded to the case's dtype
  std::vector<ModelPass> passes;    // the same, on the CPU
  at::Tensor cotangent;             // of the output, fp64, rounded to the case's dtype
};

// Weights keep activations near one and the attention peaked (see datasets/goldens/README.md), so
// that a wrong operand shows; in 16 bits timesteps are such that their products with 1000 are
// exact.
ModelData draw_model_data(const ModelCase& c);
ModelData golden_model_data(const ModelCase& c, const ModelGolden& golden);

// The sum over passes of weight * forward(pass).
at::Tensor weighted_sum(const std::vector<ModelPass>& passes,
                        const std::function<at::Tensor(const ModelPass&)>& forward);

// The samples of one data-parallel replica.
std::vector<ModelPass> replica_passes(const ModelCase& c, const ModelData& data, int dp);

}  // namespace shardproof::verify
