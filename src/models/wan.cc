// WanTransformer3DModel, as diffusers' models/transformers/transformer_wan.py computes it (0.42.1),
// text to video: self-attention over the video tokens, cross-attention to text that no rank shards.
#include "models/wan.h"

#include <ATen/ATen.h>

#include "attention/cross_attention.h"
#include "base/error.h"
#include "comm/tag.h"
#include "models/config_reader.h"
#include "models/patches.h"

namespace shardproof::models {
namespace {

using at::Tensor;

struct Config {
  Patch patch;
  int64_t heads, head_dim, in_channels, out_channels, text_dim, freq_dim, ffn_dim, num_layers;
  int64_t inner() const { return heads * head_dim; }
  // The frame axis takes what rows and columns leave.
  std::vector<int64_t> axes() const {
    const int64_t spatial = 2 * (head_dim / 6);
    return {head_dim - 2 * spatial, spatial, spatial};
  }
};

Config read_config(const JsonValue& json) {
  ConfigReader reader(json);
  Config c{};
  const auto patch = reader.integers("patch_size", {1, 2, 2});
  reader.require(patch.size() == 3, "patch_size must be three numbers");
  if (patch.size() == 3) c.patch = {patch[0], patch[1], patch[2]};
  c.heads = reader.integer("num_attention_heads", 40);
  c.head_dim = reader.integer("attention_head_dim", 128);
  c.in_channels = reader.integer("in_channels", 16);
  c.out_channels = reader.integer("out_channels", 16);
  c.text_dim = reader.integer("text_dim", 4096);
  c.freq_dim = reader.integer("freq_dim", 256);
  c.ffn_dim = reader.integer("ffn_dim", 13824);
  c.num_layers = reader.integer("num_layers", 40);
  reader.integer("rope_max_seq_len", 1024);  // tables are made for the tokens at hand
  reader.only("cross_attn_norm", true);
  reader.only("qk_norm", std::string("rms_norm_across_heads"));
  reader.only("eps", 1e-6);
  reader.only("image_dim", false);  // image to video is another model: null or missing only
  reader.only("added_kv_proj_dim", false);
  reader.only("pos_embed_seq_len", false);
  reader.finish();
  return c;
}

struct Shared {
  RopeTable rope;  // this rank's rows
  std::shared_ptr<const attention::LocalAttention> local;
};

class Wan final : public Transformer {
 public:
  explicit Wan(const Config& config) : config_(config) {}
  std::string class_name() const override { return "WanTransformer3DModel"; }

  std::vector<ParameterSpec> parameter_specs() const override {
    std::vector<ParameterSpec> specs;
    const SpecBuilder root(specs);
    const int64_t c = config_.inner();
    const auto [pf, ph, pw] = config_.patch;
    root.tensor("patch_embedding.weight", {c, config_.in_channels, pf, ph, pw});
    root.tensor("patch_embedding.bias", {c});
    const SpecBuilder condition = root.at("condition_embedder");
    condition.at("time_embedder").linear("linear_1", config_.freq_dim, c);
    condition.at("time_embedder").linear("linear_2", c, c);
    condition.linear("time_proj", c, 6 * c);
    condition.at("text_embedder").linear("linear_1", config_.text_dim, c);
    condition.at("text_embedder").linear("linear_2", c, c);
    for (int64_t i = 0; i < config_.num_layers; ++i) {
      add_block(root.at("blocks").at(std::to_string(i)));
    }
    root.linear("proj_out", c, pf * ph * pw * config_.out_channels);
    root.tensor("scale_shift_table", {1, 2, c});
    return specs;
  }

  const plan::ModelPlan& sharding_plan() const override {
    static const plan::ModelPlan plan = {
        {"patch_embedding", "patches", plan::TensorUse::kSplit, "video", 3, 1},
        {"rope", "rope", plan::TensorUse::kSplit, "video", 2, 0},
        {"proj_out", "output", plan::TensorUse::kGather, "video", 3, 1},
        {"", "hidden_states", plan::TensorUse::kWhole, "", 5},
        {"condition_embedder", "encoder_hidden_states", plan::TensorUse::kWhole, "", 3},
        {"condition_embedder", "timestep", plan::TensorUse::kWhole, "", 1},
    };
    return plan;
  }

  Geometry geometry() const override {
    Geometry g{config_.num_layers, config_.heads, config_.head_dim};
    g.patch = config_.patch;
    g.video = true;
    g.visual_stream = "video";
    return g;
  }

  std::vector<AttentionUse> attentions() const override {
    return {{"self", config_.num_layers, {"video"}, {"video"}},
            {"cross", config_.num_layers, {"video"}, {"text"}}};
  }

  std::string stream_of(const std::string& parameter) const override {
    return first_match(parameter,
                       {{"time_embedder", ""},
                        {"time_proj", ""},
                        {"text_embedder", "text"},
                        {"attn2.to_k", "text"},
                        {"attn2.to_v", "text"}},
                       "video");
  }

  plan::AttentionPlan attention_plan(const TransformerInputs& inputs,
                                     const ParallelContext& parallel) const override {
    const auto [f, h, w] = grid(inputs);
    return parallel.plan({{"video", f * h * w}}, config_.heads);
  }

  Tensor forward(const ParameterSet& parameters, const TransformerInputs& in,
                 const ParallelContext& parallel, const ForwardOptions& options) const override {
    check_inputs(sharding_plan(), in);
    const at::ScalarType dtype = in.hidden_states.scalar_type();
    const plan::AttentionPlan plan = attention_plan(in, parallel);
    const Scope root(parameters, options.policy,
                     StreamDropout::make(options.dropout, plan, parallel.sp_rank()));
    Sharding sharding(sharding_plan(), plan, parallel);
    const auto attend = parallel.attention(plan, dtype, false);
    const auto [f, h_, w] = grid(in);
    const Tensor positions = grid_positions(f, h_, w).to(in.hidden_states.device());
    const auto shared = std::make_shared<const Shared>(
        Shared{sharding.split("rope", rope_table(positions, config_.axes(), dtype, options.policy)),
               attention::make_local_attention(parallel.options().backend, parallel.device(), dtype,
                                               false)});
    const Scope condition = root.at("condition_embedder");
    const Tensor sinusoid =
        timestep_sinusoid(in.timestep, config_.freq_dim, 1, dtype, options.policy);
    options.tell("timestep.sinusoid", sinusoid);
    const Tensor temb = condition.silu_mlp("time_embedder", sinusoid);
    const Tensor modulation =
        condition.linear("time_proj", at::silu(temb)).unflatten(1, {6, -1});  // [B,6,C]
    const Tensor e = condition.gelu_mlp("text_embedder", in.encoder_hidden_states);
    Tensor h = at::linear(sharding.split("patches", to_patches(in.hidden_states, config_.patch)),
                          root.tensor("patch_embedding.weight").flatten(1),
                          root.tensor("patch_embedding.bias"));
    for (int64_t i = 0; i < config_.num_layers; ++i) {
      const std::string name = fmt::format("blocks.{}", i);
      const Block block = [this, shared, attend, at = root.at(name)](const std::vector<Tensor>& x) {
        return std::vector<Tensor>{run_block(at, x[0], x[1], x[2], *shared, attend)};
      };
      h = models::run_block(options, name, block, {e, h, modulation})[0];
      options.tell(fmt::format("block.{}.hidden_states", i), h);
    }
    // shift, scale; without the SiLU that the blocks' modulation has.
    const auto mod = (root.tensor("scale_shift_table") + temb.unsqueeze(1)).chunk(2, 1);
    const Tensor normed = modulate(norm_wide(h, options.policy), mod[0], mod[1]).to(dtype);
    const Tensor out = sharding.gather("output", root.linear("proj_out", normed));
    sharding.finish();
    return from_patches(out, grid(in), config_.patch);
  }

 private:
  Patch grid(const TransformerInputs& in) const {
    const auto [pf, ph, pw] = config_.patch;
    if (in.hidden_states.dim() != 5) {
      bad_input("Wan: hidden_states must be latents [B,C,F,H,W]; got {}",
                c10::str(in.hidden_states.sizes()));
    }
    return {in.hidden_states.size(2) / pf, in.hidden_states.size(3) / ph,
            in.hidden_states.size(4) / pw};
  }

  void add_block(const SpecBuilder& block) const {
    const int64_t c = config_.inner();
    block.tensor("scale_shift_table", {1, 6, c});
    for (const char* name : {"attn1", "attn2"}) {
      for (const char* norm : {"norm_q", "norm_k"}) block.at(name).norm(norm, c);
      for (const char* linear : {"to_q", "to_k", "to_v", "to_out.0"}) {
        block.at(name).linear(linear, c, c);
      }
    }
    block.tensor("norm2.weight", {c});
    block.tensor("norm2.bias", {c});
    block.linear("ffn.net.0.proj", c, config_.ffn_dim);
    block.linear("ffn.net.2", config_.ffn_dim, c);
  }

  // FP32LayerNorm whose result stays wide until it has been modulated.
  static Tensor norm_wide(const Tensor& x, DtypePolicy policy) {
    return layer_norm(policy == DtypePolicy::kFaithful ? x.to(at::kFloat) : x);
  }

  // q and k are normed over all heads together, before the split.
  Tensor head(const Scope& attn, const char* linear, const char* norm, const Tensor& x) const {
    Tensor y = attn.linear(linear, x);
    if (norm) {
      y = rms_norm(y, attn.tensor(std::string(norm) + ".weight"), RmsNormKind::kTorch,
                   attn.policy());
    }
    return split_heads(y, config_.heads);
  }

  Tensor run_block(const Scope& block, const Tensor& e, Tensor h, const Tensor& modulation,
                   const Shared& shared, const JointAttention& attend) const {
    const at::ScalarType dtype = h.scalar_type();
    const DtypePolicy policy = block.policy();
    const at::ScalarType wide = policy == DtypePolicy::kFaithful ? at::kFloat : dtype;
    const auto mod = (block.tensor("scale_shift_table").to(wide) + modulation.to(wide)).chunk(6, 1);
    const auto add = [&](const Tensor& x, const Tensor& y, const Tensor& gate) {
      return (x.to(wide) + y.to(wide) * gate).to(dtype);
    };
    const Tensor n1 = modulate(norm_wide(h, policy), mod[0], mod[1]).to(dtype);
    const Scope attn1 = block.at("attn1");
    {
      const comm::CollectiveScope scope("attn1");
      const auto result =
          attend({{apply_rope(head(attn1, "to_q", "norm_q", n1), shared.rope, policy),
                   apply_rope(head(attn1, "to_k", "norm_k", n1), shared.rope, policy),
                   head(attn1, "to_v", nullptr, n1)}},
                 {});
      h = add(h, attn1.attention_out("video", merge_heads(result.streams[0])), mod[2]);
    }
    const Tensor n2 =
        layer_norm_fp32(h, block.tensor("norm2.weight"), block.tensor("norm2.bias"), policy);
    const Scope attn2 = block.at("attn2");
    const Tensor crossed = attention::cross_attention(
        shared.local, head(attn2, "to_q", "norm_q", n2), head(attn2, "to_k", "norm_k", e),
        head(attn2, "to_v", nullptr, e));
    h = h + attn2.attention_out("video", merge_heads(crossed));
    const Tensor n3 = modulate(norm_wide(h, policy), mod[3], mod[4]).to(dtype);
    return add(h, block.feed_forward("ffn", "video", n3), mod[5]);
  }

  Config config_;
};

}  // namespace

std::unique_ptr<Transformer> make_wan(const JsonValue& config) {
  return std::make_unique<Wan>(read_config(config));
}

}  // namespace shardproof::models
