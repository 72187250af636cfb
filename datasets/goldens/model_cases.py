"""The model goldens of make_model_goldens.py: sizes, weights and inputs, drawn from a seed in float32."""

import json
import math
from dataclasses import dataclass

import diffusers
import numpy as np
import torch
from make_attention_goldens import Streams

QWEN = "QwenImageTransformer2DModel"
FLUX = "FluxTransformer2DModel"
SD3 = "SD3Transformer2DModel"
WAN = "WanTransformer3DModel"

# latent: sizes of the latent; of Flux, the grid of its tokens; of Qwen, (frames, rows, columns) of each image of a
# sample. valid: text tokens that are no padding. t: timesteps, as forward takes them.
QWEN_CONFIG = dict(
    patch_size=2, in_channels=16, out_channels=4, num_layers=2, num_attention_heads=4, attention_head_dim=8,
    joint_attention_dim=24, guidance_embeds=False, axes_dims_rope=(2, 2, 4),
)  # fmt: skip
QWEN_WIDE = QWEN_CONFIG | dict(attention_head_dim=16, axes_dims_rope=(4, 6, 6))
FLUX_CONFIG = dict(
    patch_size=1, in_channels=16, num_layers=1, num_single_layers=2, num_attention_heads=4, attention_head_dim=8,
    joint_attention_dim=24, pooled_projection_dim=20, guidance_embeds=True, axes_dims_rope=(2, 2, 4),
)  # fmt: skip
SD3_CONFIG = dict(
    sample_size=8, patch_size=2, in_channels=4, num_layers=3, num_attention_heads=4, attention_head_dim=8,
    joint_attention_dim=24, caption_projection_dim=32, pooled_projection_dim=20, out_channels=4,
    pos_embed_max_size=16, dual_attention_layers=(0,), qk_norm="rms_norm",
)  # fmt: skip
WAN_CONFIG = dict(
    patch_size=(1, 2, 2), num_attention_heads=4, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=24,
    freq_dim=256, ffn_dim=96, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads", eps=1e-6,
)  # fmt: skip
CASES = {
    "qwenimage_mask": dict(
        model=QWEN, config=QWEN_WIDE, batch=2, latent=[(1, 4, 6)], text=8, valid=[3, 8], t=[0.7325, 0.261]
    ),
    "qwenimage_nomask": dict(
        model=QWEN, config=QWEN_CONFIG | dict(num_attention_heads=6), batch=1, latent=[(1, 5, 7)], text=7, t=[0.4175]
    ),
    "qwenimage_edit": dict(
        model=QWEN, config=QWEN_CONFIG | dict(zero_cond_t=True), batch=2, latent=[(1, 4, 4), (1, 3, 4)],
        text=8, valid=[5, 8], t=[0.8125, 0.333],
    ),
    "flux_dev": dict(
        model=FLUX, config=FLUX_CONFIG, batch=2, latent=(4, 6), text=8, t=[0.6875, 0.219], guidance=[3.5, 1.25]
    ),
    "sd35": dict(model=SD3, config=SD3_CONFIG, batch=2, latent=(4, 16), text=8, t=[731.25, 250.5]),
    "wan": dict(model=WAN, config=WAN_CONFIG, batch=2, latent=(2, 8, 12), text=8, t=[617.5, 143.25]),
}  # fmt: skip

# Nothing of these reaches the output: the text stream is dropped after the last joint block.
WITHOUT_GRADIENT = {
    QWEN: [
        "attn.add_q_proj.bias", "attn.add_q_proj.weight", "attn.norm_added_q.weight", "attn.to_add_out.bias",
        "attn.to_add_out.weight", "txt_mlp.net.0.proj.bias", "txt_mlp.net.0.proj.weight", "txt_mlp.net.2.bias",
        "txt_mlp.net.2.weight",
    ],
    SD3: ["attn.add_q_proj.bias", "attn.add_q_proj.weight", "attn.norm_added_q.weight"],
}  # fmt: skip


@dataclass
class Case:
    """The content of the files that results are computed from."""

    model: str
    config: dict
    weights: dict  # float32
    inputs: dict  # the tensors of forward
    cotangent: torch.Tensor
    arguments: dict  # the other arguments of forward


MODULATION = (
    "img_mod.1.weight", "txt_mod.1.weight", "norm1.linear.weight", "norm1_context.linear.weight",
    "norm.linear.weight", "norm_out.linear.weight", "time_proj.weight",
)  # fmt: skip


def draw_weight(streams, name, shape):
    """No parameter is 0 or 1, and the qk-norms exceed 1, so that the attention is peaked."""
    if name.endswith(("norm_q.weight", "norm_k.weight", "norm_added_q.weight", "norm_added_k.weight")):
        mean, deviation = 1.4, 0.2
    elif name.endswith(".bias"):
        mean, deviation = 0.0, 0.1
    elif name.endswith("scale_shift_table"):
        mean, deviation = 0.0, 0.3
    elif len(shape) == 1:  # weights of norms
        mean, deviation = 1.0, 0.2
    else:
        gain = 1.5 if name.endswith("embedder.linear_2.weight") else 1.2 if name.endswith(MODULATION) else 1.0
        mean, deviation = 0.0, gain / math.sqrt(math.prod(shape[1:]))
    return torch.from_numpy((mean + streams.normal("param/" + name, shape, deviation)).astype(np.float32))


def draw_inputs(spec, normal):
    """(tensors, other arguments of forward, facts for case.json)"""
    config, text, timestep = spec["config"], spec["text"], torch.tensor(spec["t"])
    channels, latent, arguments = config["in_channels"], spec["latent"], {}
    if spec["model"] == WAN:
        grid = [size // patch for size, patch in zip(latent, config["patch_size"])]
        facts = {"token_counts": {"video": math.prod(grid), "text": text}}
        facts |= {"latent_fhw": list(latent), "token_grid_fhw": grid}
        inputs = {"hidden_states": normal("hidden_states", channels, *latent), "timestep": timestep}
        inputs["encoder_hidden_states"] = normal("encoder_hidden_states", text, config["text_dim"])
        return inputs, arguments, facts
    if spec["model"] == QWEN:
        arguments = {"img_shapes": [list(latent)] * spec["batch"]}
        tokens = [math.prod(shape) for shape in latent]
        facts, image = {"image_tokens_per_img_shape": tokens}, sum(tokens)
    elif spec["model"] == FLUX:
        facts, image = {"image_grid": list(latent)}, math.prod(latent)
    else:
        facts, image = {"latent_hw": list(latent)}, math.prod(size // config["patch_size"] for size in latent)
    states = (channels, *latent) if spec["model"] == SD3 else (image, channels)
    inputs = {
        "hidden_states": normal("hidden_states", *states),
        "encoder_hidden_states": normal("encoder_hidden_states", text, config["joint_attention_dim"]),
    }
    if "pooled_projection_dim" in config:
        inputs["pooled_projections"] = normal("pooled_projections", config["pooled_projection_dim"])
    if "valid" in spec:
        inputs["encoder_hidden_states_mask"] = torch.arange(text)[None, :] < torch.tensor(spec["valid"])[:, None]
    inputs["timestep"] = timestep
    if spec["model"] == FLUX:
        inputs["guidance"] = torch.tensor(spec["guidance"])
        axes = [torch.arange(size) for size in (1, *latent)]
        inputs["img_ids"] = torch.cartesian_prod(*axes).float()
        # Not the zeros of the pipeline, so that the text's rows of the RoPE table matter.
        inputs["txt_ids"] = torch.tensor([[k % 3, k, 2 * k] for k in range(text)]).float()
    return inputs, arguments, {"token_counts": {"image": image, "text": text, "joint": image + text}, **facts}


def build(case):
    model = getattr(diffusers, case.model).from_config(case.config).eval()
    model.load_state_dict(case.weights)
    return model


def draw_case(name, seed):
    """The case, and facts for case.json."""
    spec, streams = CASES[name], Streams(seed, name)

    def normal(tag, *shape):
        return torch.from_numpy(streams.normal("input/" + tag, (spec["batch"], *shape)).astype(np.float32))

    inputs, arguments, facts = draw_inputs(spec, normal)
    model = getattr(diffusers, spec["model"])(**spec["config"]).eval()
    with torch.no_grad():
        for parameter, value in model.named_parameters():
            value.copy_(draw_weight(streams, parameter, value.shape))
        output = model(**inputs, **arguments, return_dict=False)[0]
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    config = json.loads(model.to_json_string())
    heads, head_dim = config["num_attention_heads"], config["attention_head_dim"]
    facts = {"batch": spec["batch"], **facts, "heads": heads, "head_dim": head_dim, "inner_dim": heads * head_dim}
    facts["valid_text_lengths"] = spec.get("valid")
    return Case(spec["model"], config, weights, inputs, normal("cotangent", *output.shape[1:]), arguments), facts
