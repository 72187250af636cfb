// SD3Transformer2DModel, as diffusers' models/transformers/transformer_sd3.py computes it (0.42.1).
#include "models/sd3.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "base/error.h"
#include "comm/tag.h"
#include "models/config_reader.h"
#include "models/patches.h"

namespace shardproof::models {
namespace {

using at::Tensor;

struct Config {
  int64_t patch_size, in_channels, out_channels, num_layers, head_dim, heads, text_dim, pooled_dim,
      table_size;
  std::vector<int64_t> dual_layers;
  int64_t inner() const { return heads * head_dim; }
  bool dual(int64_t layer) const {
    return std::find(dual_layers.begin(), dual_layers.end(), layer) != dual_layers.end();
  }
  bool last(int64_t layer) const { return layer + 1 == num_layers; }
};

Config read_config(const JsonValue& json) {
  ConfigReader reader(json);
  Config c{};
  reader.integer("sample_size", 128);  // of the training images; the table below is what is used
  c.patch_size = reader.integer("patch_size", 2);
  c.in_channels = reader.integer("in_channels", 16);
  c.num_layers = reader.integer("num_layers", 18);
  c.head_dim = reader.integer("attention_head_dim", 64);
  c.heads = reader.integer("num_attention_heads", 18);
  c.text_dim = reader.integer("joint_attention_dim", 4096);
  c.pooled_dim = reader.integer("pooled_projection_dim", 2048);
  c.out_channels = reader.integer("out_channels", 16);
  c.table_size = reader.integer("pos_embed_max_size", 96);
  c.dual_layers = reader.integers("dual_attention_layers", {});
  reader.require(reader.integer("caption_projection_dim", 1152) == c.inner(),
                 "caption_projection_dim must equal heads x head_dim");
  reader.require(reader.text("qk_norm", "") == "rms_norm",
                 "only qk_norm = rms_norm (SD3.5) is supported");
  reader.finish();
  return c;
}

class SD3 final : public Transformer {
 public:
  explicit SD3(Config config) : config_(std::move(config)) {}
  std::string class_name() const override { return "SD3Transformer2DModel"; }

  std::vector<ParameterSpec> parameter_specs() const override {
    std::vector<ParameterSpec> specs;
    const SpecBuilder root(specs);
    const int64_t c = config_.inner(), p = config_.patch_size;
    root.at("pos_embed").tensor("pos_embed", {1, config_.table_size * config_.table_size, c}, true);
    root.at("pos_embed").tensor("proj.weight", {c, config_.in_channels, p, p});
    root.at("pos_embed").tensor("proj.bias", {c});
    const auto mlp = [&](const char* name, int64_t in) {
      root.at("time_text_embed").at(name).linear("linear_1", in, c);
      root.at("time_text_embed").at(name).linear("linear_2", c, c);
    };
    mlp("timestep_embedder", 256);
    mlp("text_embedder", config_.pooled_dim);
    root.linear("context_embedder", config_.text_dim, c);
    for (int64_t i = 0; i < config_.num_layers; ++i) {
      add_block(root.at("transformer_blocks").at(std::to_string(i)), i);
    }
    root.at("norm_out").linear("linear", c, 2 * c);
    root.linear("proj_out", c, p * p * config_.out_channels);
    return specs;
  }

  const plan::ModelPlan& sharding_plan() const override {
    static const plan::ModelPlan plan = {
        {"pos_embed", "patches", plan::TensorUse::kSplit, "image", 3, 1},
        {"pos_embed", "pos_embed", plan::TensorUse::kSplit, "image", 3, 1},
        {"", "encoder_hidden_states", plan::TensorUse::kSplit, "text", 3, 1},
        {"proj_out", "output", plan::TensorUse::kGather, "image", 3, 1},
        {"", "hidden_states", plan::TensorUse::kWhole, "", 4},
        {"time_text_embed", "timestep", plan::TensorUse::kWhole, "", 1},
        {"time_text_embed", "pooled_projections", plan::TensorUse::kWhole, "", 2},
    };
    return plan;
  }

  Geometry geometry() const override {
    Geometry g{config_.num_layers, config_.heads, config_.head_dim};
    g.patch = {1, config_.patch_size, config_.patch_size};
    g.usual_text = 333;  // 77 of CLIP, 256 of T5
    g.largest_grid = config_.table_size;
    return g;
  }

  std::vector<AttentionUse> attentions() const override {
    std::vector<AttentionUse> uses = {
        {"joint", config_.num_layers, {"image", "text"}, {"image", "text"}}};
    int64_t dual = 0;
    for (int64_t i = 0; i < config_.num_layers; ++i) dual += config_.dual(i) ? 1 : 0;
    if (dual > 0) uses.push_back({"image", dual, {"image"}, {"image"}});
    return uses;
  }

  std::string stream_of(const std::string& parameter) const override {
    return first_match(
        parameter, {{"time_text_embed", ""}, {"norm", ""}, {"context", "text"}, {"add_", "text"}},
        "image");
  }

  plan::AttentionPlan attention_plan(const TransformerInputs& inputs,
                                     const ParallelContext& parallel) const override {
    return parallel.plan(
        {{"image", image_tokens(inputs)}, {"text", inputs.encoder_hidden_states.size(1)}},
        config_.heads);
  }

  Tensor forward(const ParameterSet& parameters, const TransformerInputs& in,
                 const ParallelContext& parallel, const ForwardOptions& options) const override {
    check_inputs(sharding_plan(), in);
    const at::ScalarType dtype = in.hidden_states.scalar_type();
    const plan::AttentionPlan plan = attention_plan(in, parallel);
    const Scope root(parameters, options.policy,
                     StreamDropout::make(options.dropout, plan, parallel.sp_rank()));
    Sharding sharding(sharding_plan(), plan, parallel);
    const Attention attend = {
        parallel.attention(plan, dtype, false),
        parallel.attention(parallel.plan({{"image", image_tokens(in)}}, config_.heads), dtype,
                           false)};
    const Scope embed = root.at("time_text_embed");
    const Tensor sinusoid = timestep_sinusoid(in.timestep, 256, 1, dtype, options.policy);
    options.tell("timestep.sinusoid", sinusoid);
    const Tensor temb = at::silu(embed.silu_mlp("timestep_embedder", sinusoid) +
                                 embed.silu_mlp("text_embedder", in.pooled_projections));
    Tensor h = embed_image(root, in, sharding);
    Tensor e = root.linear("context_embedder",
                           sharding.split("encoder_hidden_states", in.encoder_hidden_states));
    for (int64_t i = 0; i < config_.num_layers; ++i) {
      const std::string name = fmt::format("transformer_blocks.{}", i);
      const Block block = [this, i, attend, at = root.at(name)](const std::vector<Tensor>& x) {
        return run_block(at, i, x[0], x[1], x[2], attend);
      };
      const auto y = models::run_block(options, name, block, {e, h, temb});
      h = y[0];
      options.tell(fmt::format("block.{}.hidden_states", i), h);
      if (config_.last(i)) break;
      e = y[1];
      options.tell(fmt::format("block.{}.encoder_hidden_states", i), e);
    }
    const auto mod = root.linear("norm_out.linear", temb).unsqueeze(1).chunk(2, -1);
    const Tensor out = root.linear("proj_out", modulate(layer_norm(h), mod[1], mod[0]));
    const int64_t p = config_.patch_size;
    const Patch grid = {1, in.hidden_states.size(2) / p, in.hidden_states.size(3) / p};
    Tensor whole = sharding.gather("output", out);
    sharding.finish();
    return from_patches(whole, grid, {1, p, p}).squeeze(2);
  }

 private:
  struct Attention {
    JointAttention joint, image_only;
  };

  int64_t image_tokens(const TransformerInputs& in) const {
    const int64_t p = config_.patch_size;
    if (in.hidden_states.dim() != 4 || in.hidden_states.size(2) % p ||
        in.hidden_states.size(3) % p) {
      bad_input("SD3: hidden_states must be latents [B,C,H,W] with H and W multiples of {}; got {}",
                p, c10::str(in.hidden_states.sizes()));
    }
    return in.hidden_states.size(2) / p * (in.hidden_states.size(3) / p);
  }

  void add_block(const SpecBuilder& block, int64_t layer) const {
    const int64_t c = config_.inner();
    block.at("norm1").linear("linear", c, (config_.dual(layer) ? 9 : 6) * c);
    block.at("norm1_context").linear("linear", c, (config_.last(layer) ? 2 : 6) * c);
    const auto attention = [&](const char* name) {
      SpecBuilder attn = block.at(name);
      for (const char* norm : {"norm_q", "norm_k"}) attn.norm(norm, config_.head_dim);
      for (const char* linear : {"to_q", "to_k", "to_v", "to_out.0"}) attn.linear(linear, c, c);
      return attn;
    };
    const SpecBuilder attn = attention("attn");
    for (const char* name : {"norm_added_q", "norm_added_k"}) attn.norm(name, config_.head_dim);
    for (const char* name : {"add_q_proj", "add_k_proj", "add_v_proj"}) attn.linear(name, c, c);
    if (config_.dual(layer)) attention("attn2");
    const auto feed_forward = [&](const char* name) {
      block.at(name).linear("net.0.proj", c, 4 * c);
      block.at(name).linear("net.2", 4 * c, c);
    };
    feed_forward("ff");
    if (!config_.last(layer)) {
      attn.linear("to_add_out", c, c);
      feed_forward("ff_context");
    }
  }

  // The patch convolution as a product on this rank's patches, plus the centre of the position
  // table.
  Tensor embed_image(const Scope& root, const TransformerInputs& in, Sharding& sharding) const {
    const int64_t p = config_.patch_size, size = config_.table_size;
    const int64_t h = in.hidden_states.size(2) / p, w = in.hidden_states.size(3) / p;
    if (h > size || w > size) {
      bad_input("SD3: {}x{} patches do not fit the position table of {}x{}", h, w, size, size);
    }
    const Tensor patches = to_patches(in.hidden_states.unsqueeze(2), {1, p, p});
    const Scope embed = root.at("pos_embed");
    const Tensor table = embed.tensor("pos_embed")
                             .view({size, size, -1})
                             .narrow(0, (size - h) / 2, h)
                             .narrow(1, (size - w) / 2, w)
                             .reshape({1, h * w, -1});
    const Tensor x = at::linear(sharding.split("patches", patches),
                                embed.tensor("proj.weight").flatten(1), embed.tensor("proj.bias"));
    return x + sharding.split("pos_embed", table).to(x.scalar_type());
  }

  attention::StreamQkv project(const Scope& attn, const Tensor& x, const char* q, const char* k,
                               const char* v, const char* norm_q, const char* norm_k) const {
    const auto head = [&](const char* name) {
      return split_heads(attn.linear(name, x), config_.heads);
    };
    const auto norm = [&](const char* name, const Tensor& y) {
      return rms_norm(y, attn.tensor(std::string(name) + ".weight"), RmsNormKind::kDiffusers,
                      attn.policy());
    };
    return {norm(norm_q, head(q)), norm(norm_k, head(k)), head(v)};
  }

  // Image first; the last block returns no text.
  std::vector<Tensor> run_block(const Scope& block, int64_t layer, Tensor e, Tensor h,
                                const Tensor& temb, const Attention& attend) const {
    const bool dual = config_.dual(layer), last = config_.last(layer);
    const auto im = block.linear("norm1.linear", temb).unsqueeze(1).chunk(dual ? 9 : 6, -1);
    const auto tm = block.linear("norm1_context.linear", temb).unsqueeze(1).chunk(last ? 2 : 6, -1);
    const Tensor normed = layer_norm(h);
    // The last block's context norm has scale before shift (AdaLayerNormContinuous).
    const Tensor text =
        last ? modulate(layer_norm(e), tm[1], tm[0]) : modulate(layer_norm(e), tm[0], tm[1]);
    const Scope attn = block.at("attn");
    std::vector<Tensor> joint;
    {
      const comm::CollectiveScope scope("attn");
      joint = attend
                  .joint({project(attn, modulate(normed, im[0], im[1]), "to_q", "to_k", "to_v",
                                  "norm_q", "norm_k"),
                          project(attn, text, "add_q_proj", "add_k_proj", "add_v_proj",
                                  "norm_added_q", "norm_added_k")},
                         {})
                  .streams;
    }
    h = h + im[2] * attn.attention_out("image", merge_heads(joint[0]));
    if (dual) {
      const Scope attn2 = block.at("attn2");
      const comm::CollectiveScope scope("attn2");
      const auto result = attend.image_only({project(attn2, modulate(normed, im[6], im[7]), "to_q",
                                                     "to_k", "to_v", "norm_q", "norm_k")},
                                            {});
      h = h + im[8] * attn2.attention_out("image", merge_heads(result.streams[0]));
    }
    h = h + im[5] * block.feed_forward("ff", "image", modulate(layer_norm(h), im[3], im[4]));
    if (last) return {h};
    e = e + tm[2] * attn.linear("to_add_out", merge_heads(joint[1]));
    e = e + tm[5] * block.feed_forward("ff_context", "text", modulate(layer_norm(e), tm[3], tm[4]));
    return {h, e};
  }

  Config config_;
};

}  // namespace

std::unique_ptr<Transformer> make_sd3(const JsonValue& config) {
  return std::make_unique<SD3>(read_config(config));
}

}  // namespace shardproof::models
