// FluxTransformer2DModel, as diffusers' models/transformers/transformer_flux.py computes it
// (0.42.1).
#include "models/flux.h"

#include <ATen/ATen.h>

#include "base/error.h"
#include "comm/tag.h"
#include "models/config_reader.h"

namespace shardproof::models {
namespace {

using at::Tensor;

struct Config {
  int64_t patch_size, in_channels, out_channels, num_layers, num_single_layers, head_dim, heads,
      text_dim, pooled_dim;
  bool guidance;
  std::vector<int64_t> axes;
  int64_t inner() const { return heads * head_dim; }
};

Config read_config(const JsonValue& json) {
  ConfigReader reader(json);
  Config c{};
  c.patch_size = reader.integer("patch_size", 1);
  c.in_channels = reader.integer("in_channels", 64);
  c.out_channels = reader.integer("out_channels", c.in_channels);
  c.num_layers = reader.integer("num_layers", 19);
  c.num_single_layers = reader.integer("num_single_layers", 38);
  c.head_dim = reader.integer("attention_head_dim", 128);
  c.heads = reader.integer("num_attention_heads", 24);
  c.text_dim = reader.integer("joint_attention_dim", 4096);
  c.pooled_dim = reader.integer("pooled_projection_dim", 768);
  c.guidance = reader.boolean("guidance_embeds", false);
  c.axes = reader.integers("axes_dims_rope", {16, 56, 56});
  reader.require(c.axes.size() == 3 && c.axes[0] + c.axes[1] + c.axes[2] == c.head_dim,
                 "axes_dims_rope must be three numbers that add up to attention_head_dim");
  reader.finish();
  return c;
}

struct Shared {
  Tensor temb;                      // SiLU of the conditioning, [B,C]
  RopeTable text_rope, image_rope;  // this rank's rows
};

class Flux final : public Transformer {
 public:
  explicit Flux(Config config) : config_(std::move(config)) {}
  std::string class_name() const override { return "FluxTransformer2DModel"; }

  std::vector<ParameterSpec> parameter_specs() const override {
    std::vector<ParameterSpec> specs;
    const SpecBuilder root(specs);
    const int64_t c = config_.inner();
    const SpecBuilder embed = root.at("time_text_embed");
    const auto mlp = [&](const char* name, int64_t in) {
      embed.at(name).linear("linear_1", in, c);
      embed.at(name).linear("linear_2", c, c);
    };
    mlp("timestep_embedder", 256);
    if (config_.guidance) mlp("guidance_embedder", 256);
    mlp("text_embedder", config_.pooled_dim);
    root.linear("context_embedder", config_.text_dim, c);
    root.linear("x_embedder", config_.in_channels, c);
    for (int64_t i = 0; i < config_.num_layers; ++i) {
      add_double_block(root.at("transformer_blocks").at(std::to_string(i)));
    }
    for (int64_t i = 0; i < config_.num_single_layers; ++i) {
      add_single_block(root.at("single_transformer_blocks").at(std::to_string(i)));
    }
    root.at("norm_out").linear("linear", c, 2 * c);
    root.linear("proj_out", c, config_.patch_size * config_.patch_size * config_.out_channels);
    return specs;
  }

  const plan::ModelPlan& sharding_plan() const override {
    static const plan::ModelPlan plan = {
        {"", "hidden_states", plan::TensorUse::kSplit, "image", 3, 1},
        {"", "encoder_hidden_states", plan::TensorUse::kSplit, "text", 3, 1},
        {"pos_embed", "image_rope", plan::TensorUse::kSplit, "image", 2, 0},
        {"pos_embed", "text_rope", plan::TensorUse::kSplit, "text", 2, 0},
        {"proj_out", "output", plan::TensorUse::kGather, "image", 3, 1},
        {"pos_embed", "img_ids", plan::TensorUse::kWhole, "", 2},
        {"pos_embed", "txt_ids", plan::TensorUse::kWhole, "", 2},
        {"time_text_embed", "timestep", plan::TensorUse::kWhole, "", 1},
        {"time_text_embed", "guidance", plan::TensorUse::kWhole, "", 1, 0, true},
        {"time_text_embed", "pooled_projections", plan::TensorUse::kWhole, "", 2},
    };
    return plan;
  }

  Geometry geometry() const override {
    Geometry g{config_.num_layers + config_.num_single_layers, config_.heads, config_.head_dim};
    g.patch = {1, 2, 2};  // packed by the pipeline
    return g;
  }

  std::vector<AttentionUse> attentions() const override {
    return {{"joint", geometry().layers, {"text", "image"}, {"text", "image"}}};
  }

  std::string stream_of(const std::string& parameter) const override {
    return first_match(parameter,
                       {{"time_text_embed", ""},
                        {"norm", ""},
                        {"single_transformer_blocks", "joint"},
                        {"context", "text"},
                        {"add_", "text"}},
                       "image");
  }

  plan::AttentionPlan attention_plan(const TransformerInputs& inputs,
                                     const ParallelContext& parallel) const override {
    return parallel.plan(
        {{"text", inputs.encoder_hidden_states.size(1)}, {"image", inputs.hidden_states.size(1)}},
        config_.heads);
  }

  Tensor forward(const ParameterSet& parameters, const TransformerInputs& in,
                 const ParallelContext& parallel, const ForwardOptions& options) const override {
    check_inputs(sharding_plan(), in);
    check(in);
    const plan::AttentionPlan plan = attention_plan(in, parallel);
    const Scope root(parameters, options.policy,
                     StreamDropout::make(options.dropout, plan, parallel.sp_rank()));
    Sharding sharding(sharding_plan(), plan, parallel);
    const auto attend = parallel.attention(plan, in.hidden_states.scalar_type(), false);
    const Shared shared = prepare(root, in, sharding, options);
    Tensor h = root.linear("x_embedder", sharding.split("hidden_states", in.hidden_states));
    Tensor e = root.linear("context_embedder",
                           sharding.split("encoder_hidden_states", in.encoder_hidden_states));
    int64_t index = 0;
    const auto run = [&](const std::string& name, bool single) {
      // The tables are inputs, as gradients flow through them to the ids: a recomputed block
      // differentiates its inputs only.
      const Block block = [this, single, attend, at = root.at(name)](const std::vector<Tensor>& x) {
        const Shared shared = {x[2], {x[3], x[4]}, {x[5], x[6]}};
        return single ? single_block(at, x[0], x[1], shared, attend)
                      : double_block(at, x[0], x[1], shared, attend);
      };
      const std::vector<Tensor> x = {e,
                                     h,
                                     shared.temb,
                                     shared.text_rope.cos,
                                     shared.text_rope.sin,
                                     shared.image_rope.cos,
                                     shared.image_rope.sin};
      const std::vector<Tensor> y = run_block(options, name, block, x);
      e = y[0], h = y[1];
      options.tell(fmt::format("block.{}.encoder_hidden_states", index), e);
      options.tell(fmt::format("block.{}.hidden_states", index), h);
      ++index;
    };
    for (int64_t i = 0; i < config_.num_layers; ++i)
      run(fmt::format("transformer_blocks.{}", i), false);
    for (int64_t i = 0; i < config_.num_single_layers; ++i) {
      run(fmt::format("single_transformer_blocks.{}", i), true);
    }
    const auto mod = root.linear("norm_out.linear", shared.temb).unsqueeze(1).chunk(2, -1);
    const Tensor out = root.linear("proj_out", modulate(layer_norm(h), mod[1], mod[0]));
    Tensor whole = sharding.gather("output", out);
    sharding.finish();
    return whole;
  }

 private:
  void add_double_block(const SpecBuilder& block) const {
    const int64_t c = config_.inner();
    block.at("norm1").linear("linear", c, 6 * c);
    block.at("norm1_context").linear("linear", c, 6 * c);
    const SpecBuilder attn = block.at("attn");
    for (const char* name : {"norm_q", "norm_k", "norm_added_q", "norm_added_k"}) {
      attn.norm(name, config_.head_dim);
    }
    for (const char* name : {"to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj",
                             "add_v_proj", "to_add_out"}) {
      attn.linear(name, c, c);
    }
    for (const char* name : {"ff", "ff_context"}) {
      block.at(name).linear("net.0.proj", c, 4 * c);
      block.at(name).linear("net.2", 4 * c, c);
    }
  }

  void add_single_block(const SpecBuilder& block) const {
    const int64_t c = config_.inner();
    block.at("norm").linear("linear", c, 3 * c);
    block.linear("proj_mlp", c, 4 * c);
    block.linear("proj_out", 5 * c, c);
    for (const char* name : {"norm_q", "norm_k"}) block.at("attn").norm(name, config_.head_dim);
    for (const char* name : {"to_q", "to_k", "to_v"}) block.at("attn").linear(name, c, c);
  }

  void check(const TransformerInputs& in) const {
    if (config_.guidance != in.guidance.defined()) {
      bad_input("Flux: the configuration says guidance_embeds={}, so guidance must {}be given",
                config_.guidance, config_.guidance ? "" : "not ");
    }
    const auto fits = [](const Tensor& ids, int64_t tokens) {
      return ids.defined() && ids.dim() == 2 && ids.size(0) == tokens && ids.size(1) == 3;
    };
    if (!fits(in.img_ids, in.hidden_states.size(1)) ||
        !fits(in.txt_ids, in.encoder_hidden_states.size(1))) {
      bad_input("Flux: img_ids and txt_ids must be [tokens,3] for the image and text tokens");
    }
  }

  Shared prepare(const Scope& root, const TransformerInputs& in, Sharding& sharding,
                 const ForwardOptions& options) const {
    const at::ScalarType dtype = in.hidden_states.scalar_type();
    const Scope embed = root.at("time_text_embed");
    const auto embed_number = [&](const std::string& name, const Tensor& t) {
      const Tensor x = timestep_sinusoid(t.to(dtype) * 1000, 256, 1, dtype, root.policy());
      options.tell(name + ".sinusoid", x);
      return embed.silu_mlp(name + "_embedder", x);
    };
    Tensor temb = embed_number("timestep", in.timestep);
    if (config_.guidance) temb = temb + embed_number("guidance", in.guidance);
    temb = temb + embed.silu_mlp("text_embedder", in.pooled_projections);
    const auto table = [&](const Tensor& ids) {
      return rope_table(ids, config_.axes, dtype, root.policy());
    };
    return {at::silu(temb), sharding.split("text_rope", table(in.txt_ids)),
            sharding.split("image_rope", table(in.img_ids))};
  }

  attention::StreamQkv project(const Scope& attn, const Tensor& x, const RopeTable& rope,
                               const char* q, const char* k, const char* v, const char* norm_q,
                               const char* norm_k) const {
    const auto head = [&](const char* name) {
      return split_heads(attn.linear(name, x), config_.heads);
    };
    const auto norm = [&](const char* name, const Tensor& y) {
      return apply_rope(rms_norm(y, attn.tensor(std::string(name) + ".weight"), RmsNormKind::kTorch,
                                 attn.policy()),
                        rope, attn.policy());
    };
    return {norm(norm_q, head(q)), norm(norm_k, head(k)), head(v)};
  }

  std::vector<Tensor> double_block(const Scope& block, Tensor e, Tensor h, const Shared& shared,
                                   const JointAttention& attend) const {
    const auto im = block.linear("norm1.linear", shared.temb).unsqueeze(1).chunk(6, -1);
    const auto tm = block.linear("norm1_context.linear", shared.temb).unsqueeze(1).chunk(6, -1);
    const Scope attn = block.at("attn");
    const comm::CollectiveScope scope("attn");
    const auto result =
        attend({project(attn, modulate(layer_norm(e), tm[0], tm[1]), shared.text_rope, "add_q_proj",
                        "add_k_proj", "add_v_proj", "norm_added_q", "norm_added_k"),
                project(attn, modulate(layer_norm(h), im[0], im[1]), shared.image_rope, "to_q",
                        "to_k", "to_v", "norm_q", "norm_k")},
               {});
    e = e + tm[2] * attn.linear("to_add_out", merge_heads(result.streams[0]));
    h = h + im[2] * attn.attention_out("image", merge_heads(result.streams[1]));
    h = h + im[5] * block.feed_forward("ff", "image", modulate(layer_norm(h), im[3], im[4]));
    e = e + tm[5] * block.feed_forward("ff_context", "text", modulate(layer_norm(e), tm[3], tm[4]));
    return {e, h};
  }

  // Text and image tokens side by side; this rank's rows of both.
  std::vector<Tensor> single_block(const Scope& block, const Tensor& e, const Tensor& h,
                                   const Shared& shared, const JointAttention& attend) const {
    const int64_t text = e.size(1), rest = h.size(1);
    const Tensor x = at::cat({e, h}, 1);
    const auto mod = block.linear("norm.linear", shared.temb).unsqueeze(1).chunk(3, -1);
    const Tensor n = modulate(layer_norm(x), mod[0], mod[1]);
    const attention::StreamQkv joint =
        project(block.at("attn"), n, concatenate(shared.text_rope, shared.image_rope), "to_q",
                "to_k", "to_v", "norm_q", "norm_k");
    const auto rows = [&](int64_t from, int64_t count) {
      return attention::StreamQkv{joint.q.narrow(1, from, count), joint.k.narrow(1, from, count),
                                  joint.v.narrow(1, from, count)};
    };
    const comm::CollectiveScope scope("attn");
    const auto result = attend({rows(0, text), rows(text, rest)}, {});
    const Tensor attended = merge_heads(at::cat({result.streams[0], result.streams[1]}, 1));
    const Tensor mlp = gelu_tanh(block.linear("proj_mlp", n));
    const Tensor y = x + mod[2] * block.linear("proj_out", at::cat({attended, mlp}, 2));
    return {y.narrow(1, 0, text), y.narrow(1, text, rest)};
  }

  Config config_;
};

}  // namespace

std::unique_ptr<Transformer> make_flux(const JsonValue& config) {
  return std::make_unique<Flux>(read_config(config));
}

}  // namespace shardproof::models
