// QwenImageTransformer2DModel, as diffusers' models/transformers/transformer_qwenimage.py computes
// it (0.42.1), also with zero_cond_t (edit: condition images are modulated with timestep 0).
#include "models/qwen_image.h"

#include <ATen/ATen.h>

#include "base/error.h"
#include "comm/tag.h"
#include "models/config_reader.h"

namespace shardproof::models {
namespace {

using at::Tensor;

struct Config {
  int64_t patch_size, in_channels, out_channels, num_layers, head_dim, heads, text_dim;
  std::vector<int64_t> axes;
  bool zero_cond_t;
  int64_t inner() const { return heads * head_dim; }
};

Config read_config(const JsonValue& json) {
  ConfigReader reader(json);
  Config c{};
  c.patch_size = reader.integer("patch_size", 2);
  c.in_channels = reader.integer("in_channels", 64);
  c.out_channels = reader.integer("out_channels", 16);
  c.num_layers = reader.integer("num_layers", 60);
  c.head_dim = reader.integer("attention_head_dim", 128);
  c.heads = reader.integer("num_attention_heads", 24);
  c.text_dim = reader.integer("joint_attention_dim", 3584);
  c.axes = reader.integers("axes_dims_rope", {16, 56, 56});
  c.zero_cond_t = reader.boolean("zero_cond_t", false);
  reader.only("guidance_embeds", false);
  reader.only("use_additional_t_cond", false);
  reader.only("use_layer3d_rope", false);
  reader.require(c.axes.size() == 3 && c.axes[0] + c.axes[1] + c.axes[2] == c.head_dim,
                 "axes_dims_rope must be three numbers that add up to attention_head_dim");
  reader.finish();
  return c;
}

// What every block needs beside its tokens.
struct Shared {
  Tensor temb;       // [B,C], or [2B,C] with zero_cond_t: the given timestep, then timestep 0
  Tensor is_target;  // bool [1, local image rows, 1] with zero_cond_t: tokens of the first image
  RopeTable text_rope, image_rope;  // this rank's rows
  Tensor key_mask;                  // joint, or undefined
};

class QwenImage final : public Transformer {
 public:
  explicit QwenImage(Config config) : config_(std::move(config)) {}
  std::string class_name() const override { return "QwenImageTransformer2DModel"; }

  std::vector<ParameterSpec> parameter_specs() const override {
    std::vector<ParameterSpec> specs;
    const SpecBuilder root(specs);
    const int64_t c = config_.inner();
    root.at("time_text_embed").at("timestep_embedder").linear("linear_1", 256, c);
    root.at("time_text_embed").at("timestep_embedder").linear("linear_2", c, c);
    root.norm("txt_norm", config_.text_dim);
    root.linear("img_in", config_.in_channels, c);
    root.linear("txt_in", config_.text_dim, c);
    for (int64_t i = 0; i < config_.num_layers; ++i) {
      add_block(root.at("transformer_blocks").at(std::to_string(i)));
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
        {"transformer_blocks", "modulate_index", plan::TensorUse::kSplit, "image", 1, 0, true},
        {"proj_out", "output", plan::TensorUse::kGather, "image", 3, 1},
        {"transformer_blocks", "encoder_hidden_states_mask", plan::TensorUse::kWhole, "", 2, 0,
         true},
        {"time_text_embed", "timestep", plan::TensorUse::kWhole, "", 1},
    };
    return plan;
  }

  Geometry geometry() const override {
    Geometry g{config_.num_layers, config_.heads, config_.head_dim};
    g.patch = {1, 2, 2};  // packed by the pipeline
    return g;
  }

  std::vector<AttentionUse> attentions() const override {
    return {{"joint", config_.num_layers, {"text", "image"}, {"text", "image"}}};
  }

  std::string stream_of(const std::string& parameter) const override {
    return first_match(parameter,
                       {{"time_text_embed", ""},
                        {"norm_out", ""},
                        {"_mod.", ""},
                        {"txt_", "text"},
                        {"add_", "text"}},
                       "image");
  }

  // zero_cond_t embeds timestep 0 as well, for the image's modulation.
  int64_t conditioning_rows(const std::string& parameter) const override {
    const bool given_only =
        first_match(parameter, {{"norm_out", "1"}, {"txt_mod", "1"}}, "") == "1";
    return config_.zero_cond_t && !given_only ? 2 : 1;
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
    const auto attend = parallel.attention(plan, in.hidden_states.scalar_type(),
                                           in.encoder_hidden_states_mask.defined());
    // Shared ownership: a recomputed block runs after this function has returned.
    const auto shared = std::make_shared<const Shared>(prepare(root, in, sharding, options));
    Tensor h = root.linear("img_in", sharding.split("hidden_states", in.hidden_states));
    Tensor e = root.linear(
        "txt_in",
        rms_norm(sharding.split("encoder_hidden_states", in.encoder_hidden_states),
                 root.tensor("txt_norm.weight"), RmsNormKind::kDiffusers, options.policy));
    for (int64_t i = 0; i < config_.num_layers; ++i) {
      const std::string name = fmt::format("transformer_blocks.{}", i);
      const Block block = [this, shared, attend, at = root.at(name)](const std::vector<Tensor>& x) {
        return run_block(at, x[0], x[1], x[2], *shared, attend);
      };
      const auto y = models::run_block(options, name, block, {e, h, shared->temb});
      e = y[0], h = y[1];
      options.tell(fmt::format("block.{}.encoder_hidden_states", i), e);
      options.tell(fmt::format("block.{}.hidden_states", i), h);
    }
    const auto out_mod = root.linear("norm_out.linear", at::silu(target_half(shared->temb, in)))
                             .unsqueeze(1)
                             .chunk(2, -1);  // scale, shift
    const Tensor out = root.linear("proj_out", modulate(layer_norm(h), out_mod[1], out_mod[0]));
    Tensor whole = sharding.gather("output", out);
    sharding.finish();
    return whole;
  }

 private:
  void add_block(const SpecBuilder& block) const {
    const int64_t c = config_.inner();
    block.linear("img_mod.1", c, 6 * c);
    const SpecBuilder attn = block.at("attn");
    for (const char* name : {"to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj",
                             "to_out.0", "to_add_out"}) {
      attn.linear(name, c, c);
    }
    for (const char* name : {"norm_q", "norm_k", "norm_added_q", "norm_added_k"}) {
      attn.norm(name, config_.head_dim);
    }
    block.linear("img_mlp.net.0.proj", c, 4 * c);
    block.linear("img_mlp.net.2", 4 * c, c);
    block.linear("txt_mod.1", c, 6 * c);
    block.linear("txt_mlp.net.0.proj", c, 4 * c);
    block.linear("txt_mlp.net.2", 4 * c, c);
  }

  void check(const TransformerInputs& in) const {
    int64_t tokens = 0;
    for (const auto& [f, h, w] :
         in.img_shapes.empty() ? std::vector<ImageShape>{} : in.img_shapes[0]) {
      tokens += f * h * w;
    }
    if (tokens != in.hidden_states.size(1)) {
      bad_input("QwenImage: img_shapes of the first sample hold {} tokens; hidden_states has {}",
                tokens, in.hidden_states.size(1));
    }
    for (const auto& sample : in.img_shapes) {
      if (sample != in.img_shapes[0]) {
        bad_input(
            "QwenImage: all samples of a batch must have the same img_shapes (positions are "
            "taken from the first)");
      }
    }
  }

  // diffusers casts the timestep to the tokens' dtype before the factor 1000.
  Shared prepare(const Scope& root, const TransformerInputs& in, Sharding& sharding,
                 const ForwardOptions& options) const {
    const at::ScalarType dtype = in.hidden_states.scalar_type();
    Tensor t = in.timestep.to(dtype);
    if (config_.zero_cond_t) t = at::cat({t, t * 0}, 0);
    Shared shared;
    const Tensor sinusoid = timestep_sinusoid(t, 256, 1000, dtype, root.policy());
    options.tell("timestep.sinusoid", sinusoid);
    shared.temb = root.at("time_text_embed").silu_mlp("timestep_embedder", sinusoid);
    const auto& images = in.img_shapes[0];
    const auto device = in.hidden_states.device();
    const auto table = [&](const Tensor& positions) {
      return rope_table(positions.to(device), config_.axes, dtype, root.policy());
    };
    shared.image_rope = sharding.split("image_rope", table(qwen_image_positions(images)));
    shared.text_rope = sharding.split(
        "text_rope", table(qwen_text_positions(images, in.encoder_hidden_states.size(1))));
    if (in.encoder_hidden_states_mask.defined()) {
      const Tensor valid = in.encoder_hidden_states_mask.ne(0);
      shared.key_mask =
          at::cat({valid, at::ones({valid.size(0), in.hidden_states.size(1)}, valid.options())}, 1);
    }
    if (config_.zero_cond_t) {
      const auto& [f, h, w] = images[0];
      const Tensor first = at::arange(in.hidden_states.size(1), at::kLong).lt(f * h * w).to(device);
      shared.is_target = sharding.split("modulate_index", first).unsqueeze(0).unsqueeze(-1);
    }
    return shared;
  }

  Tensor target_half(const Tensor& temb, const TransformerInputs& in) const {
    return config_.zero_cond_t ? temb.narrow(0, 0, in.hidden_states.size(0)) : temb;
  }

  // shift, scale, gate for attention, then for the MLP; [B,1,C], or per token with zero_cond_t.
  std::vector<Tensor> image_modulation(const Scope& block, const Tensor& temb,
                                       const Shared& shared) const {
    Tensor mod = block.linear("img_mod.1", at::silu(temb)).unsqueeze(1);
    if (config_.zero_cond_t) {
      const int64_t batch = mod.size(0) / 2;
      mod = at::where(shared.is_target, mod.narrow(0, 0, batch), mod.narrow(0, batch, batch));
    }
    return mod.chunk(6, -1);
  }

  attention::StreamQkv project(const Scope& attn, const Tensor& x, const RopeTable& rope,
                               bool is_text) const {
    const auto head = [&](const char* name) {
      return split_heads(attn.linear(name, x), config_.heads);
    };
    const auto norm = [&](const char* name, const Tensor& y) {
      return apply_rope(rms_norm(y, attn.tensor(std::string(name) + ".weight"),
                                 RmsNormKind::kDiffusers, attn.policy()),
                        rope, attn.policy());
    };
    if (is_text) {
      return {norm("norm_added_q", head("add_q_proj")), norm("norm_added_k", head("add_k_proj")),
              head("add_v_proj")};
    }
    return {norm("norm_q", head("to_q")), norm("norm_k", head("to_k")), head("to_v")};
  }

  std::vector<Tensor> run_block(const Scope& block, Tensor e, Tensor h, const Tensor& temb,
                                const Shared& shared, const JointAttention& attend) const {
    const auto im = image_modulation(block, temb, shared);
    const Tensor text_temb = config_.zero_cond_t ? temb.narrow(0, 0, temb.size(0) / 2) : temb;
    const auto tm = block.linear("txt_mod.1", at::silu(text_temb)).unsqueeze(1).chunk(6, -1);
    const Scope attn = block.at("attn");
    const comm::CollectiveScope scope("attn");
    const auto result =
        attend({project(attn, modulate(layer_norm(e), tm[0], tm[1]), shared.text_rope, true),
                project(attn, modulate(layer_norm(h), im[0], im[1]), shared.image_rope, false)},
               shared.key_mask);
    e = e + tm[2] * attn.linear("to_add_out", merge_heads(result.streams[0]));
    h = h + im[2] * attn.attention_out("image", merge_heads(result.streams[1]));
    h = h + im[5] * block.feed_forward("img_mlp", "image", modulate(layer_norm(h), im[3], im[4]));
    e = e + tm[5] * block.feed_forward("txt_mlp", "text", modulate(layer_norm(e), tm[3], tm[4]));
    return {e, h};
  }

  Config config_;
};

}  // namespace

std::unique_ptr<Transformer> make_qwen_image(const JsonValue& config) {
  return std::make_unique<QwenImage>(read_config(config));
}

}  // namespace shardproof::models
