#include "verify/models/model_data.h"

#include <ATen/ATen.h>

#include <cmath>

#include "base/error.h"
#include "comm/random_streams.h"
#include "models/lora.h"

namespace shardproof::verify {
namespace {

using at::Tensor;
using models::TransformerInputs;

constexpr int64_t kTextChannels = 24, kPooledChannels = 20;
constexpr double kGuidanceWeight =
    4;  // of classifier-free guidance: negative + 4 (positive - negative)

// Normal numbers in fp64 from a stream per name: adding a tensor leaves the others as they are.
class NamedDraw {
 public:
  explicit NamedDraw(uint64_t seed) : seed_(seed) {}
  Tensor normal(const std::string& name, at::IntArrayRef shape) const {
    at::Generator generator = stream(name);
    return at::randn(shape, generator, at::kDouble);
  }
  // Integers in [low, high).
  Tensor integers(const std::string& name, int64_t low, int64_t high, at::IntArrayRef shape) const {
    at::Generator generator = stream(name);
    return at::randint(low, high, shape, generator, at::kLong);
  }

 private:
  at::Generator stream(const std::string& name) const {
    return comm::make_generator(comm::derive_seed(seed_, name), at::kCPU);
  }

  uint64_t seed_;
};

std::string config_of(const ModelCase& c) {
  const int64_t d = c.head_dim, spatial = 2 * (3 * d / 16);
  const std::string axes = fmt::format("[{},{},{}]", d - 2 * spatial, spatial, spatial);
  if (c.subject == "qwenimage" || c.subject == "qwenimage_edit") {
    return fmt::format(
        R"({{"_class_name":"QwenImageTransformer2DModel","attention_head_dim":{},
            "axes_dims_rope":{},"in_channels":16,"out_channels":4,"joint_attention_dim":{},
            "num_attention_heads":{},"num_layers":{},"patch_size":2,"zero_cond_t":{}}})",
        d, axes, kTextChannels, c.heads, c.layers, c.has_condition());
  }
  if (c.subject == "flux") {
    return fmt::format(
        R"({{"_class_name":"FluxTransformer2DModel","attention_head_dim":{},"axes_dims_rope":{},
            "in_channels":16,"joint_attention_dim":{},"num_attention_heads":{},"num_layers":{},
            "num_single_layers":{},"patch_size":1,"pooled_projection_dim":{},
            "guidance_embeds":true}})",
        d, axes, kTextChannels, c.heads, c.layers, c.layers + 1, kPooledChannels);
  }
  if (c.subject == "sd3") {
    return fmt::format(
        R"({{"_class_name":"SD3Transformer2DModel","attention_head_dim":{},"in_channels":4,
            "out_channels":4,"joint_attention_dim":{},"num_attention_heads":{},"num_layers":{},
            "caption_projection_dim":{},"patch_size":2,"pooled_projection_dim":{},
            "pos_embed_max_size":32,"qk_norm":"rms_norm","dual_attention_layers":[0]}})",
        d, kTextChannels, c.heads, c.layers, c.heads * d, kPooledChannels);
  }
  return fmt::format(
      R"({{"_class_name":"WanTransformer3DModel","attention_head_dim":{},"in_channels":4,
          "out_channels":4,"text_dim":{},"num_attention_heads":{},"num_layers":{},"ffn_dim":{},
          "freq_dim":256,"patch_size":[1,2,2]}})",
      d, kTextChannels, c.heads, c.layers, c.ffn > 0 ? c.ffn : 2 * c.heads * d);
}

Tensor draw_parameter(const models::ParameterSpec& spec, const NamedDraw& draw) {
  const Tensor x = draw.normal(spec.name, spec.shape);
  if (spec.name.ends_with(".bias")) return 0.1 * x;
  // Peaked attention: a wrong key or mask changes much.
  const bool qk_norm = spec.name.find("norm_q") != std::string::npos ||
                       spec.name.find("norm_k") != std::string::npos ||
                       spec.name.find("norm_added") != std::string::npos;
  if (spec.shape.size() == 1) return (qk_norm ? 1.4 : 1.0) + 0.2 * x;
  if (spec.buffer || spec.name.ends_with("scale_shift_table")) return 0.5 * x;
  const int64_t fan_in = c10::multiply_integers(spec.shape) / spec.shape[0];
  return x / std::sqrt(static_cast<double>(fan_in));
}

bool is_low(at::ScalarType type) { return type == at::kBFloat16 || type == at::kHalf; }

// In [0, 1); in 16 bits among numbers whose product with 1000 is exact.
Tensor draw_times(const ModelCase& c, int64_t samples, const NamedDraw& draw,
                  const std::string& name) {
  if (is_low(c.dtype)) return at::pow(2.0, -draw.integers(name, 1, 4, {samples}).to(at::kDouble));
  return draw.integers(name, 1, 1000, {samples}).to(at::kDouble) / 1000 + 0.00025;
}

// true = valid; the last sample has all its tokens.
Tensor ragged_mask(int64_t samples, int64_t tokens, const NamedDraw& draw,
                   const std::string& name) {
  Tensor lengths = draw.integers(name, 1, tokens + 1, {samples});
  lengths[samples - 1] = tokens;
  return at::arange(tokens, at::kLong).unsqueeze(0).lt(lengths.unsqueeze(1));
}

TransformerInputs draw_inputs(const ModelCase& c, const NamedDraw& draw) {
  const int64_t samples = c.mesh.dp * c.batch;
  const auto [f, h, w] = c.grid;
  TransformerInputs in;
  in.encoder_hidden_states = draw.normal("text", {samples, c.text, kTextChannels});
  in.timestep = draw_times(c, samples, draw, "timestep");
  if (c.subject == "sd3" || c.subject == "wan") in.timestep = in.timestep * 1000;
  if (c.subject == "sd3") {
    in.hidden_states = draw.normal("latents", {samples, 4, 2 * h, 2 * w});
  } else if (c.subject == "wan") {
    in.hidden_states = draw.normal("latents", {samples, 4, f, 2 * h, 2 * w});
  } else {
    in.hidden_states = draw.normal("latents", {samples, c.all_image_tokens(), 16});
  }
  if (c.subject == "flux" || c.subject == "sd3") {
    in.pooled_projections = draw.normal("pooled", {samples, kPooledChannels});
  }
  if (c.subject == "flux") {
    in.guidance = at::pow(2.0, draw.integers("guidance", 0, 3, {samples}).to(at::kDouble));
    in.img_ids = models::grid_positions(f, h, w).to(at::kDouble);
    // Not zero as in the pipeline, so that the text rows of the table matter.
    const Tensor k = at::arange(c.text, at::kDouble);
    in.txt_ids = at::stack({k.remainder(3), k.remainder(7), k.remainder(5)}, 1);
  }
  if (c.subject.starts_with("qwenimage")) {
    std::vector<models::ImageShape> images = {{1, h, w}};
    if (c.has_condition()) images.push_back({1, h - 1, w});
    in.img_shapes.assign(static_cast<size_t>(samples), images);
  }
  if (c.ragged) in.encoder_hidden_states_mask = ragged_mask(samples, c.text, draw, "mask");
  return in;
}

// The second pass of guidance: the same latents and times, other text.
ModelPass negative_pass(const ModelCase& c, const TransformerInputs& positive,
                        const NamedDraw& draw) {
  ModelPass pass{1 - kGuidanceWeight, positive, "negative.", {}};
  pass.inputs.encoder_hidden_states =
      draw.normal("negative text", positive.encoder_hidden_states.sizes());
  if (positive.pooled_projections.defined()) {
    pass.inputs.pooled_projections =
        draw.normal("negative pooled", positive.pooled_projections.sizes());
  }
  if (c.ragged) {
    pass.inputs.encoder_hidden_states_mask =
        ragged_mask(positive.encoder_hidden_states.size(0), c.text, draw, "negative mask");
  }
  return pass;
}

// Rounds floating tensors to the case's dtype; tensors that passes share stay shared.
void round_inputs(std::vector<ModelPass>& passes, at::ScalarType dtype) {
  std::map<c10::TensorImpl*, Tensor> rounded;
  for (ModelPass& pass : passes) {
    for (auto& [name, x] : pass.inputs.tensors()) {
      if (!x.is_floating_point()) continue;
      auto& y = rounded[x.unsafeGetTensorImpl()];
      if (!y.defined()) y = x.to(dtype).to(at::kDouble);
      pass.inputs[name] = y;
    }
  }
}

void round_parameters(models::ParameterSet& parameters, at::ScalarType dtype) {
  for (const auto& spec : std::vector<models::ParameterSpec>(parameters.specs())) {
    parameters.set(spec.name, parameters[spec.name].to(dtype).to(at::kDouble));
  }
}

void add_adapters(const ModelCase& c, models::ParameterSet& parameters, const NamedDraw& draw) {
  models::LoraConfig config;
  config.rank = 4;
  config.alpha = 6;
  models::add_lora(parameters, config, c.seed);
  for (const auto& spec : std::vector<models::ParameterSpec>(parameters.specs())) {
    if (spec.name.ends_with(".lora_B.weight")) {  // zero at the start: then A has no gradient
      parameters.set(spec.name, 0.3 * draw.normal(spec.name, spec.shape));
    }
  }
}

}  // namespace

ModelData draw_model_data(const ModelCase& c) {
  const NamedDraw draw(c.seed);
  std::shared_ptr<const models::Transformer> model =
      models::make_transformer(parse_json(config_of(c), c.id()));
  ModelData data{model, models::ParameterSet(model->parameter_specs()), {}, {}};
  for (const models::ParameterSpec& spec : model->parameter_specs()) {
    data.parameters.set(spec.name, draw_parameter(spec, draw));
  }
  if (c.lora) add_adapters(c, data.parameters, draw);
  data.passes.push_back({c.guided ? kGuidanceWeight : 1, draw_inputs(c, draw), "", {}});
  if (c.guided) data.passes.push_back(negative_pass(c, data.passes[0].inputs, draw));
  for (ModelPass& pass : data.passes) {
    if (c.dropout) {
      pass.dropout = {kDropProbability, comm::derive_seed(c.seed, pass.prefix + "dropout")};
    }
  }
  round_parameters(data.parameters, c.dtype);
  round_inputs(data.passes, c.dtype);
  // The output has the latents' shape: all models predict a velocity. In fp16 the loss is scaled
  // down, or the gradient of a timestep, of terms times 1000, leaves the range.
  const double scale = c.dtype == at::kHalf ? 1.0 / 16 : 1;
  const Tensor cotangent =
      draw.normal("cotangent", data.passes[0].inputs.hidden_states.sizes()) * scale;
  data.cotangent = cotangent.to(c.dtype).to(at::kDouble);
  return data;
}

ModelData golden_model_data(const ModelCase& c, const ModelGolden& golden) {
  ModelData data{golden.model, golden.parameters, {{1, golden.inputs, "", {}}}, golden.cotangent};
  round_parameters(data.parameters, c.dtype);
  for (const auto& [name, x] : golden.inputs.tensors()) {
    if (x.is_floating_point()) data.passes[0].inputs[name] = x.to(at::kDouble);
  }
  round_inputs(data.passes, c.dtype);
  data.cotangent = golden.cotangent.to(c.dtype).to(at::kDouble);
  return data;
}

Tensor weighted_sum(const std::vector<ModelPass>& passes,
                    const std::function<Tensor(const ModelPass&)>& forward) {
  Tensor sum;
  for (const ModelPass& pass : passes) {
    const Tensor out = forward(pass);
    const Tensor term = pass.weight == 1 ? out : out * pass.weight;
    sum = sum.defined() ? sum + term : term;
  }
  return sum;
}

std::vector<ModelPass> replica_passes(const ModelCase& c, const ModelData& data, int dp) {
  std::map<c10::TensorImpl*, Tensor> cut;
  std::vector<ModelPass> passes = data.passes;
  for (ModelPass& pass : passes) {
    pass.dropout.first_sample = dp * c.batch;
    for (auto& [name, x] : pass.inputs.tensors()) {
      if (!TransformerInputs::has_samples(name)) continue;
      auto& y = cut[x.unsafeGetTensorImpl()];
      if (!y.defined()) y = x.narrow(0, dp * c.batch, c.batch);
      pass.inputs[name] = y;
    }
    auto& shapes = pass.inputs.img_shapes;
    if (!shapes.empty()) {
      shapes = {shapes.begin() + dp * c.batch, shapes.begin() + (dp + 1) * c.batch};
    }
  }
  return passes;
}

}  // namespace shardproof::verify
