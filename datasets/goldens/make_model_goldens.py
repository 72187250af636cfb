#!/usr/bin/env python3
"""Make, or verify, the model goldens: weights and inputs in float32, forward and backward results in float64.

    python make_model_goldens.py --out DIR                        # the six cases of this folder
    python make_model_goldens.py --out DIR --cases sd35 wan --seed 5
    python make_model_goldens.py --verify [--out DIR]             # reload and recompute; default: this folder

Needs torch, diffusers 0.42.1, safetensors and numpy; CPU only. README.md beside this file describes the format.

The results are what the models of diffusers compute when every request for float32 means float64. Plain
`model.double()` is not that: diffusers casts to float32 in RoPE, timestep sinusoids, RMSNorm, FP32LayerNorm and the
blocks of Wan. So the model is built, run and differentiated inside `Float64`, which rewrites those requests, and
`Audit` looks at every operand and result of every operator for a tensor that is not float64.
"""

import argparse
import contextlib
import inspect
import json
import math
import os
import sys
import tempfile
import warnings
from pathlib import Path
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded: models are built from their configuration
warnings.filterwarnings("ignore", category=FutureWarning)

DIFFUSERS = "0.42.1"
INSTALL = f"python -m pip install torch==2.11.0 diffusers=={DIFFUSERS} safetensors numpy"
try:
    import diffusers
    import numpy as np
    import safetensors
    import torch
    from diffusers.models import embeddings
    from diffusers.models.transformers import transformer_flux
    from safetensors.numpy import load_file
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map

    from make_attention_goldens import check_sums, goldens_of, relative_l2, summarise, write_sums, write_tensors
    from model_cases import CASES, FLUX, QWEN, SD3, WITHOUT_GRADIENT, Case, build, draw_case
except ImportError as error:
    print(f"{error}\nNeeds torch and diffusers: {INSTALL}", file=sys.stderr)
    sys.exit(3)

HERE = Path(__file__).resolve().parent
FILES = ("case.json", "config.json", "expected.safetensors", "inputs.safetensors", "model.safetensors")
LIMIT = 1e-13  # --verify: relative L2 of a recomputed tensor; two float64 implementations differ by 1e-14
SLOPE_LIMIT = 1e-8  # of the gradients from finite differences; see slope_error
SEED = 20251

# ---------------------------------------------------------------------------------------------------------------------
# Float64
# ---------------------------------------------------------------------------------------------------------------------
DOUBLE = {torch.float32: torch.float64, torch.complex64: torch.complex128}
ATTENTION = torch.nn.functional.scaled_dot_product_attention


def widen(argument):
    if isinstance(argument, torch.dtype) and argument.is_floating_point and argument.itemsize < 4:
        raise RuntimeError(f"the model asks for {argument}")
    return DOUBLE.get(argument, argument) if isinstance(argument, torch.dtype) else argument


class Float64(TorchFunctionMode):
    """float32 and complex64 mean float64 and complex128 here; attention is an explicit softmax.

    With constants_float32 only casts of what is float64 already are undone: timestep frequencies and RoPE tables,
    which the model makes anew in float32, keep their float32 values.
    """

    def __init__(self, constants_float32=False):
        super().__init__()
        self.constants_float32 = constants_float32
        self.attention = []  # for each attention of the run, how peaked it is

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is ATTENTION:
            return self.attend(*args, **kwargs)
        double = bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype in DOUBLE.values()
        if double or not self.constants_float32:
            if func is torch.Tensor.float:
                return args[0].double()
            args, kwargs = tree_map(widen, args), tree_map(widen, kwargs)
        return func(*args, **kwargs)

    def attend(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if dropout_p or is_causal or enable_gqa or not (attn_mask is None or attn_mask.dtype == torch.bool):
            raise NotImplementedError("attention with dropout, causal or additive mask, or shared key heads")
        logits = torch.matmul(query, key.transpose(-2, -1)) * (scale or 1.0 / math.sqrt(query.shape[-1]))
        if attn_mask is not None:
            logits = logits.masked_fill(attn_mask.logical_not(), -math.inf)
        probabilities = torch.softmax(logits, dim=-1)
        self.attention.append(
            {
                "query_tokens": query.shape[-2],
                "key_tokens": key.shape[-2],
                "median_max_probability": float(probabilities.detach().amax(-1).median()),
            }
        )
        return torch.matmul(probabilities, value)


class Audit(TorchDispatchMode):
    """Counts the operands and results of all operators, backward included, that are floating but not float64."""

    def __init__(self):
        super().__init__()
        self.operators = self.lower = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.operators += 1
        for x in tree_leaves((args, kwargs, result)):
            if isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex()):
                self.lower += x.dtype not in DOUBLE.values()
        return result


@contextlib.contextmanager
def default_dtype(dtype):
    old = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(old)


def to_numpy(tensors):
    """In row-major order: safetensors writes the bytes of numpy arrays as they lie in memory."""
    return {name: x.detach().contiguous().numpy() for name, x in tensors.items()}


def to_double(tensors):
    return {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Running a model
# ---------------------------------------------------------------------------------------------------------------------
def blocks_of(model):
    lists = ("blocks", "transformer_blocks", "single_transformer_blocks")
    return [(f"{name}.{i}", block) for name in lists for i, block in enumerate(getattr(model, name, ()))]


def named_results(name, value):
    """Tensors in a module's result; complex ones as .cos and .sin."""
    if isinstance(value, (tuple, list)):
        return {k: x for i, part in enumerate(value) for k, x in named_results(f"{name}.{i}", part).items()}
    if value is None:
        return {}
    if value.is_complex():
        return {name + ".cos": value.real.clone(), name + ".sin": value.imag.clone()}
    return {name: value.detach().clone()}


# Modules before the first block, by the names that they have in one model or another.
DEBUG = (
    "time_text_embed", "pos_embed", "txt_norm", "txt_in", "img_in", "x_embedder", "context_embedder", "rope",
    "condition_embedder", "patch_embedding",
)  # fmt: skip


def watch(model, results):
    """Has the results of blocks and of the modules before them stored in `results`; returns the hooks."""

    def on_block(i):
        def hook(module, args, result):
            # blocks return (text, image) or, in Wan, video alone
            text, image = (None, result) if isinstance(result, torch.Tensor) else result
            if text is not None:
                results[f"block.{i}.encoder_hidden_states"] = text.detach().clone()
            results[f"block.{i}.hidden_states"] = image.detach().clone()

        return hook

    def on_debug(name):
        return lambda module, args, result: results.update(named_results("debug." + name, result))

    hooks = [block.register_forward_hook(on_block(i)) for i, (_, block) in enumerate(blocks_of(model))]
    return hooks + [getattr(model, n).register_forward_hook(on_debug(n)) for n in DEBUG if hasattr(model, n)]


def run(model, inputs, cotangent, arguments, watched=False):
    """Forward and backward: results by the names of expected.safetensors; zeros for parameters without gradient."""
    leaves = {n: x.clone().requires_grad_() if x.is_floating_point() else x for n, x in inputs.items()}
    results = {}
    hooks = watch(model, results) if watched else []
    try:
        output = model(**leaves, **arguments, return_dict=False)[0]
        loss = (output * cotangent).sum()
        model.zero_grad(set_to_none=True)
        loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    results |= {"output": output.detach().clone(), "loss": loss.detach().clone()}
    results |= {"grad.input." + n: x.grad for n, x in leaves.items() if x.is_floating_point()}
    for name, p in model.named_parameters():
        results["grad.param." + name] = torch.zeros_like(p) if p.grad is None else p.grad.clone()
    return results


def error(a, b):
    return relative_l2(a.double().numpy(), b.numpy())


def distance(a, b):
    """Relative L2 of run `a` from run `b`: output, loss and gradients, but for those that do not exist."""
    params = {n: error(a[n], b[n]) for n in b if n.startswith("grad.param.") and b[n].any()}
    inputs = {n: error(a[n], b[n]) for n in b if n.startswith("grad.input.")}
    worst, worst_input = max(params, key=params.get), max(inputs, key=inputs.get)
    return {
        "output_rel_l2": error(a["output"], b["output"]),
        "loss_rel": error(a["loss"], b["loss"]),
        "worst_param_grad_rel_l2": params[worst],
        "worst_param_grad": worst,
        "median_param_grad_rel_l2": sorted(params.values())[len(params) // 2],
        "worst_input_grad_rel_l2": inputs[worst_input],
        "worst_input_grad": worst_input,
    }


def run_alternative(case, sinusoid_float32):
    """Float64, but with float32 values of timestep frequencies and RoPE tables; and of the sinusoids, if asked."""
    model = build(case).double()
    rope, sinusoid = transformer_flux.get_1d_rotary_pos_embed, embeddings.get_timestep_embedding

    def rounded_rope(*args, **kwargs):  # Flux makes its table within forward
        cos, sin = rope(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return cos.float().double(), sin.float().double()

    def rounded_sinusoid(timesteps, *args, **kwargs):
        with torch._C.DisableTorchFunction():
            return sinusoid(timesteps.float(), *args, **kwargs).double()

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(transformer_flux, "get_1d_rotary_pos_embed", rounded_rope))
        if sinusoid_float32:
            stack.enter_context(mock.patch.object(embeddings, "get_timestep_embedding", rounded_sinusoid))
        stack.enter_context(Float64(constants_float32=True))
        return run(model, to_double(case.inputs), case.cotangent.double(), case.arguments)


class Computed:
    """All that follows from the content of a case's files."""

    def __init__(self, case):
        self.case, self.arguments = case, case.arguments
        self.inputs, self.cotangent = to_double(case.inputs), case.cotangent.double()
        mode, audit = Float64(), Audit()
        with default_dtype(torch.float64):
            with audit, mode:
                self.model = getattr(diffusers, case.model).from_config(case.config).eval()
            position_table = self.model.pos_embed.pos_embed.clone() if case.model == SD3 else None
            self.model.load_state_dict(case.weights)  # float32 numbers, copied into float64 parameters
            with audit, mode:
                self.results = run(self.model, self.inputs, self.cotangent, self.arguments, watched=True)
        self.attention, self.operators, self.lower = mode.attention, audit.operators, audit.lower
        self.zero = sorted(n for n, p in self.model.named_parameters() if not self.results["grad.param." + n].any())
        self.single = run(build(case), case.inputs, case.cotangent, self.arguments)
        self.alternatives = {
            "constants_float32": run_alternative(case, sinusoid_float32=False),
            "sinusoid_float32": run_alternative(case, sinusoid_float32=True),
        }
        if position_table is not None:
            self.alternatives["pos_embed_float64"] = self.run_with_positions(position_table)
        self.expected = dict(self.results)
        for name, alternative in self.alternatives.items():
            self.expected |= {f"alt.{name}.{n}": alternative[n] for n in ("output", "loss")}
        self.expected = to_numpy(self.expected)

    def run_with_positions(self, table):
        """SD3's table of positions is a tensor of the checkpoint: everywhere else its float32 values are used."""
        stored = self.model.pos_embed.pos_embed.clone()
        self.model.pos_embed.pos_embed.copy_(table)
        with default_dtype(torch.float64), Float64():
            results = run(self.model, self.inputs, self.cotangent, self.arguments)
        self.model.pos_embed.pos_embed.copy_(stored)
        return results

    @property
    def reference(self):
        return {n: self.results[n] for n in self.single}

    def plain_double(self):
        """What model.double() alone gives: (model, results, tensors of lower precision on the way)."""
        model, audit = build(self.case).double(), Audit()
        with audit:
            results = run(model, self.inputs, self.cotangent, self.arguments)
        return model, results, audit.lower


# ---------------------------------------------------------------------------------------------------------------------
# Checks of the computation itself, for making and verifying alike. Each check yields the complaints it has.
# ---------------------------------------------------------------------------------------------------------------------
STENCIL = ((1, 3 / 4), (2, -3 / 20), (3, 1 / 60))  # central differences, error O(step^6)
STEP = 5e-4  # of the root mean square of a tensor


def slope_error(case, model, inputs, cotangent, results):
    """Largest error of the gradients along random directions: all parameters at once, twice; each floating input.

    The error is relative to what the product of gradient and direction is on average over directions.
    """
    leaves = {n: x.clone() for n, x in inputs.items()}
    parameters = {"grad.param." + n: p for n, p in model.named_parameters()}
    groups = [parameters, parameters] + [{"grad.input." + n: x} for n, x in leaves.items() if x.is_floating_point()]
    # A sinusoid sees 1000 times the timestep (and the guidance) of Qwen and Flux, and that of the others as it is.
    sinusoid = 1e-3 if case.model in (QWEN, FLUX) else 1.0
    sizes = {"grad.input.timestep": sinusoid, "grad.input.guidance": sinusoid}
    rng, worst = np.random.default_rng(1), 0.0
    for group in groups:
        base = {n: x.detach().clone() for n, x in group.items()}
        size = {n: sizes.get(n) or max(float(x.pow(2).mean().sqrt()), 1e-2) for n, x in base.items()}
        direction = {n: size[n] * torch.from_numpy(rng.standard_normal(tuple(x.shape))) for n, x in base.items()}

        def loss(step):
            for n, x in group.items():
                x.copy_(base[n] + step * direction[n])
            return float((model(**leaves, **case.arguments, return_dict=False)[0] * cotangent).sum())

        with torch.no_grad():
            slope = sum(w * (loss(k * STEP) - loss(-k * STEP)) for k, w in STENCIL) / STEP
            loss(0.0)  # puts the group back
        exact = sum(float((results[n] * direction[n]).sum()) for n in group)
        usual = math.sqrt(sum(float((results[n] * size[n]).pow(2).sum()) for n in group))
        worst = max(worst, abs(slope - exact) / usual)
    return worst


def check_slopes(computed, measured):
    with default_dtype(torch.float64), Float64():
        off = slope_error(computed.case, computed.model, computed.inputs, computed.cotangent, computed.results)
    measured["finite_difference"] = {"max_rel_err": off, "limit": SLOPE_LIMIT, "step": f"{STEP} x rms of the tensor"}
    if not off <= SLOPE_LIMIT:
        yield f"the gradients are off by {off:.1e} from finite differences, limit {SLOPE_LIMIT:.0e}"


def check_float64(computed, measured):
    """No tensor of lower precision is met; and plain model.double() fails this, the slopes and the comparison."""
    measured["audit"] = {"operators": computed.operators, "tensors_of_lower_precision": computed.lower}
    if computed.lower or any(x.dtype != np.float64 for x in computed.expected.values()):
        yield f"not float64 throughout: {computed.lower} tensors of lower precision"
    model, results, lower = computed.plain_double()
    off = slope_error(computed.case, model, computed.inputs, computed.cotangent, results)
    apart = distance(results, computed.reference)
    measured["negative_control"] = {
        "what": "plain model.double()",
        "tensors_of_lower_precision": lower,
        "finite_difference_max_rel_err": off,
        "vs_float64": apart,
    }
    if not (lower and off > 10 * SLOPE_LIMIT and apart["output_rel_l2"] > 1e-9):
        yield "negative control: plain model.double() passes for float64"


def check_zeros(computed):
    """Gradients are zero where they cannot exist (the text stream's end, padded text) and nowhere else."""
    last = f"transformer_blocks.{computed.case.config.get('num_layers', 0) - 1}."
    known = sorted(last + name for name in WITHOUT_GRADIENT.get(computed.case.model, ()))
    if known != computed.zero:
        yield f"parameters with zero gradient: {computed.zero}, should be {known}"
    mask = computed.case.inputs.get("encoder_hidden_states_mask")
    if mask is not None:
        padded = ~mask.bool()
        if computed.results["grad.input.encoder_hidden_states"][padded].any():
            yield "padded text has a gradient"
        if not computed.case.inputs["encoder_hidden_states"][padded].all():
            yield "padded text is zero: a missing mask would go unnoticed"


def check_computation(computed, measured):
    return [*check_slopes(computed, measured), *check_float64(computed, measured), *check_zeros(computed)]


# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------
def config_text(case):
    return json.dumps(case.config, indent=2, sort_keys=True) + "\n"


def stored_tensors(case):
    """What model.safetensors and inputs.safetensors hold."""
    return to_numpy(case.weights), to_numpy({**case.inputs, "cotangent": case.cotangent})


def describe(computed, facts, measured):
    case, reference = computed.case, computed.reference
    states = ("hidden_states", "encoder_hidden_states", "pooled_projections")
    floating = [n for n, x in case.inputs.items() if x.is_floating_point()]
    forward = getattr(diffusers, case.model).forward
    modules = {"diffusers": diffusers, "torch": torch, "numpy": np, "safetensors": safetensors}
    return {
        "versions": {name: module.__version__.split("+")[0] for name, module in modules.items()},
        "model_class": case.model,
        "forward_signature": [p for p in inspect.signature(forward).parameters if p != "self"],
        "forward_arguments": {"tensors": list(case.inputs), **case.arguments, "return_dict": False},
        **facts,
        "blocks": [{"index": i, "module": name} for i, (name, _) in enumerate(blocks_of(computed.model))],
        "grad_inputs": {
            "primary": [n for n in states if n in floating],
            "secondary": [n for n in floating if n not in states],
        },
        "structurally_zero_param_grads": computed.zero,
        "attention": computed.attention,
        "float64": measured,
        "alternative_constants": {
            name: {"vs_float64": distance(x, reference), "float32_run_vs_this": distance(computed.single, x)}
            for name, x in computed.alternatives.items()
        },
        "float32_vs_float64": distance(computed.single, reference),
        "tensors": summarise(computed.expected),
    }


def write_case(folder, seed):
    """All files are complete before the first replaces what is there. Returns complaints; writes if there are none."""
    case, facts = draw_case(folder.name, seed)
    computed, measured = Computed(case), {}
    if complaints := check_computation(computed, measured):
        return complaints
    record = {"case": folder.name, "kind": "model", "seed": seed, **describe(computed, facts, measured)}
    weights, inputs = stored_tensors(case)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as name:
        new = Path(name)
        (new / "case.json").write_text(json.dumps(record, indent=1) + "\n")
        (new / "config.json").write_text(config_text(case))
        write_tensors(new / "model.safetensors", weights)
        write_tensors(new / "inputs.safetensors", inputs)
        write_tensors(new / "expected.safetensors", computed.expected)
        for file in FILES:
            os.replace(new / file, folder / file)
    return []


def load_case(folder, record):
    config = json.loads((folder / "config.json").read_text())
    tensors = [load_file(folder / name) for name in ("model.safetensors", "inputs.safetensors")]
    weights, inputs = ({n: torch.from_numpy(x) for n, x in part.items()} for part in tensors)
    for name, x in {**weights, **inputs}.items():
        if x.is_floating_point() and x.dtype != torch.float32:
            raise ValueError(f"{name} is {x.dtype}, should be float32")
    arguments = {n: v for n, v in record["forward_arguments"].items() if n not in ("tensors", "return_dict")}
    if "img_shapes" in arguments:
        arguments["img_shapes"] = [[tuple(shape) for shape in sample] for sample in arguments["img_shapes"]]
    cotangent = inputs.pop("cotangent")
    inputs = {n: inputs[n] for n in record["forward_arguments"]["tensors"]}
    return Case(record["model_class"], config, weights, inputs, cotangent, arguments)


# ---------------------------------------------------------------------------------------------------------------------
# Verification. Each check yields the complaints it has.
# ---------------------------------------------------------------------------------------------------------------------
def check_seed(case, drawn, seed):
    """Configuration, weights and inputs are what the seed yields, bit by bit."""
    if config_text(case) != config_text(drawn):
        yield "config.json is not that of this script"
    for kind, stored, yielded in zip(("weight", "input"), stored_tensors(case), stored_tensors(drawn)):
        for name in sorted(stored.keys() ^ yielded.keys()):
            yield f"{kind} {name}: {'missing' if name in yielded else 'unexpected'}"
        for name in sorted(stored.keys() & yielded.keys()):
            a, b = stored[name], yielded[name]
            if (a.dtype, a.shape, a.tobytes()) != (b.dtype, b.shape, b.tobytes()):
                yield f"{kind} {name} is not what seed {seed} yields"


def loss_size(name, computed):
    """The loss is a sum with cancellation: it is held to |output| |cotangent|."""
    return float(np.linalg.norm(computed.expected[name[:-4] + "output"]) * np.linalg.norm(computed.cotangent))


def check_expected(expected, computed, limit):
    """Every tensor within the limit, in relative L2; gradients are exactly zero at the same places."""
    for name in sorted(expected.keys() ^ computed.expected.keys()):
        yield f"{name}: {'missing' if name in computed.expected else 'not a result of this model'}"
    for name in sorted(expected.keys() & computed.expected.keys()):
        a, b = expected[name], computed.expected[name]
        if a.dtype != b.dtype:
            yield f"{name} is {a.dtype}, should be {b.dtype}"
        off = abs(a - b).sum() / loss_size(name, computed) if name.endswith("loss") else relative_l2(a, b)
        if not off <= limit:
            yield f"{name}: relative L2 {off:.2e} against the recomputed tensor, limit {limit:.0e}"
        elif name.startswith("grad.") and ((a == 0) != (b == 0)).any():
            yield f"{name}: zero where the recomputed gradient is not, or the other way round"


FACTS = ("model_class", "forward_arguments", "token_counts", "heads", "head_dim", "inner_dim", "batch", "blocks",
         "grad_inputs", "valid_text_lengths", "structurally_zero_param_grads")  # fmt: skip


def check_record(record, described):
    """case.json: facts are equal, float32 errors within a factor of two, and tensors those of the file."""
    for name in FACTS:
        fact = json.loads(json.dumps(described.get(name)))
        if name in described and record.get(name) != fact:
            yield f"case.json: {name} is {record.get(name)}, should be {fact}"
    for name in ("output_rel_l2", "worst_param_grad_rel_l2", "worst_input_grad_rel_l2"):
        stored, value = record.get("float32_vs_float64", {}).get(name), described["float32_vs_float64"][name]
        if not (isinstance(stored, float) and 0.5 < stored / value < 2):
            yield f"case.json: float32_vs_float64.{name} is {stored}, recomputed {value}"
    if record.get("tensors", {}).keys() != described["tensors"].keys():
        yield "case.json: tensors does not list those of expected.safetensors"


def check_negative_control(computed, limit):
    """One unit in the last place of a float32 input or weight, or ten limits in one result, must not go unnoticed."""
    weight, parameter = next(iter(computed.model.named_parameters()))
    for what, tensor in ((weight, parameter.data), ("hidden_states", computed.inputs["hidden_states"])):
        first = tensor.view(-1)[:1]
        stored = first.clone()
        first.copy_(torch.nextafter(stored.float(), torch.tensor(math.inf)))
        with torch.no_grad(), default_dtype(torch.float64), Float64():
            output = computed.model(**computed.inputs, **computed.arguments, return_dict=False)[0]
        first.copy_(stored)
        if error(output, computed.results["output"]) <= limit:
            yield f"negative control: a changed {what} passes"
    for name, x in computed.expected.items():
        changed = x.copy()
        changed.flat[0] += 10 * limit * (loss_size(name, computed) if name.endswith("loss") else np.linalg.norm(x) or 1)
        if not any(check_expected({**computed.expected, name: changed}, computed, limit)):
            yield f"negative control: a changed {name} passes"


def verify_case(out, name, limit):
    folder = out / name
    try:
        record = json.loads((folder / "case.json").read_text())
        case = load_case(folder, record)
        expected = load_file(folder / "expected.safetensors")
        computed, measured, facts = Computed(case), {}, {}
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, safetensors.SafetensorError) as problem:
        print(f"{name}: FAIL, the model cannot be run: {type(problem).__name__}: {problem}")
        return False
    complaints = list(check_sums(out, name, FILES))
    if name in CASES and "seed" in record:  # else someone's own golden: no seed to draw from
        drawn, facts = draw_case(name, record["seed"])
        complaints += check_seed(case, drawn, record["seed"])
    complaints += check_expected(expected, computed, limit)
    complaints += check_computation(computed, measured)
    complaints += check_record(record, describe(computed, facts, measured))
    if not complaints:
        complaints += check_negative_control(computed, limit)
    common = expected.keys() & computed.expected.keys()
    bitwise = sum(expected[n].tobytes() == computed.expected[n].tobytes() for n in common)
    worst = max((relative_l2(expected[n], computed.expected[n]) for n in common), default=math.inf)
    print(
        f"{name}: {'FAIL' if complaints else 'ok'}, {bitwise} of {len(expected)} tensors equal to the last bit, "
        f"largest difference {worst:.1e}, finite differences {measured['finite_difference']['max_rel_err']:.1e}, "
        f"plain model.double() {measured['negative_control']['vs_float64']['output_rel_l2']:.1e} off",
        flush=True,
    )
    for complaint in complaints:
        print(f"  {complaint}")
    return not complaints


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder that holds the case folders")
    parser.add_argument("--seed", type=int, default=SEED, help=f"default: {SEED}")
    parser.add_argument("--cases", nargs="+", metavar="CASE", help="default: all")
    parser.add_argument("--verify", action="store_true", help="write nothing; reload, recompute and compare")
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"--verify: relative L2 allowed, default {LIMIT}")
    args = parser.parse_args()
    if diffusers.__version__ != DIFFUSERS:
        print(f"diffusers is {diffusers.__version__}, should be {DIFFUSERS}: {INSTALL}", file=sys.stderr)
        return 3
    diffusers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)  # the same order of sums everywhere
    torch.use_deterministic_algorithms(True)
    if args.verify:
        out = args.out or HERE
        present = goldens_of(out, "model")
        cases = args.cases or present
        if not cases or set(cases) - set(present):
            parser.error(f"{out} holds these model cases: {', '.join(present) or 'none'}")
        return 0 if all([verify_case(out, case, args.limit) for case in cases]) else 1
    if args.out is None:
        parser.error("--out DIR is needed: making a set overwrites what is there")
    cases = args.cases or list(CASES)
    if unknown := sorted(set(cases) - set(CASES)):
        parser.error(f"unknown case {', '.join(unknown)}; known: {', '.join(CASES)}")
    for case in cases:
        if complaints := write_case(args.out / case, args.seed):
            print(f"{case}: not written", *complaints, sep="\n  ", file=sys.stderr)
            return 1
        write_sums(args.out, [case], FILES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
