#!/usr/bin/env python3
"""Make, or verify, the attention goldens: inputs in float32, forward and backward results in float64.

    python make_attention_goldens.py --out DIR                        # the four cases of this folder
    python make_attention_goldens.py --out DIR --variant holdout      # other seed, other shapes
    python make_attention_goldens.py --verify [--out DIR]             # reload and recompute; default: this folder

Needs numpy and safetensors. README.md beside this file describes the format.

The results are computed in numpy's longdouble (80 bit on x86) from the exactly converted float32 inputs and rounded
to float64 once, at the end: explicit softmax and explicit backward formulas, no autograd, no BLAS.
"""

import argparse
import hashlib
import json
import math
import sys
import zlib
from pathlib import Path

import numpy as np
import safetensors
from safetensors.numpy import load_file, save_file

HERE = Path(__file__).resolve().parent
FILES = ("case.json", "expected.safetensors", "inputs.safetensors")
NEEDED_RESULTS = {"out", "lse", "dq", "dk", "dv"}
LIMIT = 1e-15  # --verify: relative L2 of a recomputed tensor; rounding to float64 is 1.1e-16 of an element
DEFAULT_SEED = {"shared": 20251, "holdout": 77003}

# lengths, valid: valid keys of each sample (None: scattered keys); tokens = text + image in the joint case.
CASES = {
    "shared": {
        "attention_full_skewed": dict(draw="skewed", batch=2, tokens=64, heads=4, dim=16, blocks=4),
        "attention_keymask": dict(draw="keymask", batch=4, tokens=32, heads=4, dim=16, lengths=[1, 11, 32, None]),
        "attention_joint_textimage": dict(draw="joint", batch=2, tokens=32, heads=4, dim=16, text=8, valid=[3, 8]),
        "attention_extreme": dict(draw="extreme", batch=2, tokens=48, heads=4, dim=16, peak=80.0),
    },
    "holdout": {
        "attention_full_skewed": dict(draw="skewed", batch=1, tokens=60, heads=6, dim=8, blocks=4),
        "attention_keymask": dict(draw="keymask", batch=3, tokens=40, heads=2, dim=24, lengths=[23, 1, None]),
        "attention_joint_textimage": dict(draw="joint", batch=3, tokens=36, heads=6, dim=8, text=6, valid=[6, 1, 4]),
        "attention_extreme": dict(draw="extreme", batch=1, tokens=36, heads=6, dim=8, peak=80.0),
    },
}

# What each key block adds to the logits, per head (repeated): neighbours differ by about 10, so that a blockwise
# implementation that merges without the log-sum-exp, or in the wrong order, is far off.
BLOCK_OFFSETS = [[0.0, 10.0, 0.0, 10.0], [10.0, 0.0, 10.0, 0.0], [0.0, 10.0, 20.0, 30.0], [30.0, 20.0, 10.0, 0.0]]


class Streams:
    """One PCG64 stream for each (seed, case, tag): no draw depends on which others are made, or in what order."""

    def __init__(self, seed, case):
        self.seed, self.case = seed, case

    def rng(self, tag):
        key = [self.seed, zlib.crc32(self.case.encode()), zlib.crc32(tag.encode())]
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))

    def normal(self, tag, shape, deviation=1.0):
        return deviation * self.rng(tag).standard_normal(shape)


# ---------------------------------------------------------------------------------------------------------------------
# Inputs. Each draw_* changes q and k (float64, [B,S,H,D]) in place and returns (mask or None, facts for case.json).
# ---------------------------------------------------------------------------------------------------------------------
def draw_skewed(spec, streams, q, k):
    """The last channel of q is about 1 and that of k a constant per key block: it shifts the block's logits."""
    heads, dim, block = spec["heads"], spec["dim"], spec["tokens"] // spec["blocks"]
    q[..., -1] = 1.0 + streams.normal("q_gain", q.shape[:3], 0.1)
    offsets = [BLOCK_OFFSETS[head % len(BLOCK_OFFSETS)] for head in range(heads)]
    for head in range(heads):
        for j, offset in enumerate(offsets[head]):
            k[:, j * block : (j + 1) * block, head, -1] = offset * math.sqrt(dim)
    return None, {"key_block": block, "offsets_per_head": offsets}


def draw_keymask(spec, streams, q, k):
    """Prefixes of the given lengths; None: a third of the keys, scattered, and none in the first quarter."""
    batch, tokens = q.shape[:2]
    mask = np.zeros((batch, tokens), dtype=bool)
    scattered = streams.rng("scattered").permutation(np.arange(tokens // 4, tokens))[: tokens // 3]
    for row, length in zip(mask, spec["lengths"]):
        row[scattered if length is None else slice(length)] = True
    return mask, {"valid_keys": [np.flatnonzero(row).tolist() for row in mask], "lengths": spec["lengths"]}


def draw_joint(spec, streams, q, k):
    """Text tokens, then image tokens; the text is padded."""
    text, image = spec["text"], spec["tokens"] - spec["text"]
    mask = np.ones(q.shape[:2], dtype=bool)
    for row, length in zip(mask, spec["valid"]):
        row[length:text] = False
    return mask, {"text": text, "image": image, "order": "text, image", "valid_text_lengths": spec["valid"]}


def draw_extreme(spec, streams, q, k):
    """Logits of rank one, s_i t_j, plus a little noise, up to +-peak. Even heads: t in [-1,1]; odd: t in [0.5,1]."""
    batch, tokens, heads, dim = q.shape
    direction = streams.normal("u", (batch, 1, heads, dim))
    direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
    rng = streams.rng("st")
    s = rng.uniform(-1.0, 1.0, (batch, tokens, heads, 1))
    s[:, :2] = np.array([1.0, -1.0])[None, :, None, None]  # one row at each extreme
    t = rng.uniform(-1.0, 1.0, (batch, tokens, heads, 1))
    t[:, :, 1::2] = 0.75 + 0.25 * t[:, :, 1::2]
    q[...] = s * direction + 0.02 * q
    k[...] = t * direction + 0.02 * k
    peak = np.abs(np.einsum("bqhd,bkhd->bhqk", q, k)).max(axis=(0, 2, 3)) / math.sqrt(dim)
    gain = np.sqrt(spec["peak"] / peak)[None, None, :, None]  # every head reaches the peak
    q *= gain
    k *= gain
    return None, {}


DRAWS = {"skewed": draw_skewed, "keymask": draw_keymask, "joint": draw_joint, "extreme": draw_extreme}


def make_inputs(spec, streams):
    shape = (spec["batch"], spec["tokens"], spec["heads"], spec["dim"])
    q, k = streams.normal("q", shape, 1.3), streams.normal("k", shape, 1.3)
    mask, facts = DRAWS[spec["draw"]](spec, streams, q, k)
    inputs = {"q": q, "k": k, "v": streams.normal("v", shape), "cotangent": streams.normal("cotangent", shape)}
    inputs = {name: value.astype(np.float32) for name, value in inputs.items()}
    if mask is not None:
        inputs["mask"] = mask
    return inputs, facts


# ---------------------------------------------------------------------------------------------------------------------
# Results
# ---------------------------------------------------------------------------------------------------------------------
def scale_of(record, head_dim):
    """case.json may state the scale of the logits as a number; what it says otherwise is 1/sqrt(D)."""
    scale = record.get("scale")
    return np.longdouble(1) / np.sqrt(np.longdouble(head_dim)) if scale in (None, "1/sqrt(D)") else np.longdouble(scale)


def attention(inputs, record):
    """All results in extended precision, and beside them the scaled logits and the probabilities [B,H,S,S]."""
    names = ("q", "k", "v", "cotangent")
    q, k, v, dout = (inputs[n].astype(np.longdouble).transpose(0, 2, 1, 3) for n in names)
    key_heads, repeats = k.shape[1], q.shape[1] // k.shape[1]
    k, v = k.repeat(repeats, axis=1), v.repeat(repeats, axis=1)
    scale = scale_of(record, q.shape[-1])
    x = scale * np.matmul(q, k.swapaxes(-1, -2))
    if "mask" in inputs:
        x = np.where(inputs["mask"][:, None, None, :], x, -np.inf)
    largest = x.max(-1, keepdims=True)
    largest = np.where(np.isneginf(largest), 0, largest)  # no valid key: P = 0, out = 0, lse = log(0) = -inf
    e = np.exp(x - largest)
    total = e.sum(-1, keepdims=True)
    p = e / np.where(total > 0, total, 1)
    out = np.matmul(p, v)
    ds = p * (np.matmul(dout, v.swapaxes(-1, -2)) - (dout * out).sum(-1, keepdims=True))
    with np.errstate(divide="ignore"):
        lse = (largest + np.log(total))[..., 0]

    def of_key_heads(gradient):
        batch, heads, tokens, dim = gradient.shape
        return gradient.reshape(batch, key_heads, repeats, tokens, dim).sum(2).transpose(0, 2, 1, 3)

    results = {
        "out": out.transpose(0, 2, 1, 3),
        "lse": lse,
        "loss": (out * dout).sum(),
        "dq": (scale * np.matmul(ds, k)).transpose(0, 2, 1, 3),
        "dk": of_key_heads(scale * np.matmul(ds.swapaxes(-1, -2), q)),
        "dv": of_key_heads(np.matmul(p.swapaxes(-1, -2), dout)),
    }
    return results, x, p


def make_expected(inputs, record):
    """The tensors of expected.safetensors; with a key_block also out and lse of each block of keys alone."""
    results = dict(attention(inputs, record)[0])
    if key_block := record.get("key_block"):
        for j, first in enumerate(range(0, inputs["k"].shape[1], key_block)):
            keys = slice(first, first + key_block)
            part = {name: inputs[name][:, keys] for name in ("k", "v", "mask") if name in inputs}
            block, _, _ = attention({**inputs, **part}, record)
            results[f"block.{j}.out"], results[f"block.{j}.lse"] = block["out"], block["lse"]
    return {name: np.array(value, dtype=np.float64, order="C") for name, value in results.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------
def summarise(tensors):
    return {
        name: {
            "dtype": str(tensors[name].dtype),
            "shape": list(tensors[name].shape),
            "max_abs": float(np.abs(tensors[name]).max()),
            "l2": float(np.linalg.norm(tensors[name].ravel())),
        }
        for name in sorted(tensors)
    }


def describe(case, spec, seed, variant, inputs, facts, expected):
    _, logits, probabilities = attention(inputs, facts)
    finite = logits[np.isfinite(logits)]
    if "key_block" in facts:
        means = [expected[f"block.{j}.lse"].mean((0, 2)) for j in range(spec["blocks"])]
        facts = {**facts, "mean_block_lse_per_head": np.stack(means, 1).round(3).tolist()}
    return {
        "case": case,
        "kind": "attention",
        "variant": variant,
        "seed": seed,
        "versions": {"numpy": np.__version__, "safetensors": safetensors.__version__},
        "layout": {
            "q,k,v,out,dq,dk,dv,cotangent": "[B,S,H,D]",
            "lse": "[B,H,S], natural logarithm, of the scaled logits",
            "mask": "[B,S_k] bool, True = key may be attended to",
        },
        "scale": "1/sqrt(D)",
        "loss": "sum(out * cotangent)",
        "batch": spec["batch"],
        "tokens": spec["tokens"],
        "heads": spec["heads"],
        "head_dim": spec["dim"],
        **facts,
        "logit_range": [float(finite.min()), float(finite.max())],
        "uniform_probability": 1.0 / spec["tokens"],
        "median_max_probability": float(np.quantile(probabilities.max(-1), 0.5, method="lower")),
        "dtype": "inputs float32 (mask bool); expected float64, rounded from extended precision (numpy longdouble) "
        "on the exactly converted inputs",
        "tensors": summarise(expected),
    }


def write_tensors(path, tensors):
    # The metadata is what readers written for PyTorch files look for.
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # some versions write for the owner alone


def write_case(folder, spec, seed, variant):
    inputs, facts = make_inputs(spec, Streams(seed, folder.name))
    expected = make_expected(inputs, facts)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / "inputs.safetensors", inputs)
    write_tensors(folder / "expected.safetensors", expected)
    record = describe(folder.name, spec, seed, variant, inputs, facts, expected)
    (folder / "case.json").write_text(json.dumps(record, indent=1) + "\n")


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_sums(out):
    path = out / "SHA256SUMS"
    return dict(line.split()[::-1] for line in path.read_text().splitlines()) if path.exists() else {}


def write_sums(out, cases, files=FILES):
    """The sums of these cases; those of other goldens that lie beside them stay."""
    sums = read_sums(out) | {f"{case}/{name}": sha256(out / case / name) for case in cases for name in files}
    (out / "SHA256SUMS").write_text("".join(f"{digest}  {entry}\n" for entry, digest in sums.items()))


# ---------------------------------------------------------------------------------------------------------------------
# Verification. Each check yields the complaints it has.
# ---------------------------------------------------------------------------------------------------------------------
def relative_l2(a, b):
    """|a - b| / |b|, where -inf equals -inf; inf where the shapes differ or a NaN is in the way."""
    if a.shape != b.shape:
        return math.inf
    same = np.isneginf(a) & np.isneginf(b)
    a, b = np.where(same, 0, a), np.where(same, 0, b)
    difference, norm = np.linalg.norm((a - b).ravel()), np.linalg.norm(b.ravel())
    error = difference / norm if norm > 0 else (0.0 if difference == 0 else math.inf)
    return math.inf if math.isnan(error) else float(error)


def differing(actual, expected, limit):
    """Names of the tensors that are missing, unexpected or further off than the limit."""
    common = actual.keys() & expected.keys()
    off = {n for n in common if relative_l2(actual[n], expected[n]) > limit}
    return sorted(off | (actual.keys() ^ expected.keys()))


def check_sums(out, case, files=FILES):
    recorded = read_sums(out)
    for name in files:
        entry = f"{case}/{name}"
        if entry in recorded and recorded[entry] != sha256(out / entry):
            yield f"{entry} does not match SHA256SUMS"


def check_seed(case, record, inputs):
    """The inputs of a case of this script come from its seed, bit by bit."""
    spec = CASES.get(record.get("variant"), {}).get(case)
    if spec is None:
        return  # someone's own golden: no seed to draw from
    drawn, _ = make_inputs(spec, Streams(record["seed"], case))
    if drawn.keys() != inputs.keys():
        yield f"inputs.safetensors holds {sorted(inputs)}, the seed yields {sorted(drawn)}"
        return
    for name in drawn:
        if drawn[name].tobytes() != inputs[name].tobytes():
            yield f"input {name} is not what seed {record['seed']} yields"


def check_gradients(inputs, record, expected):
    """dq, dk, dv are the derivative of loss, by central differences along a random direction."""
    rng = np.random.default_rng(1)
    for name in ("q", "k", "v"):
        direction = rng.standard_normal(inputs[name].shape)

        def loss(step):
            moved = inputs[name].astype(np.longdouble) + np.longdouble(step) * direction
            return attention({**inputs, name: moved}, record)[0]["loss"]

        h = 1e-4
        slope = (8 * (loss(h) - loss(-h)) - (loss(2 * h) - loss(-2 * h))) / (12 * h)
        gradient = expected["d" + name]
        size = float(np.linalg.norm(gradient.ravel()))
        if abs(float(slope) - float((gradient * direction).sum())) > 1e-9 * size:
            yield f"d{name} is not the derivative of loss with respect to {name}"


def check_negative_control(inputs, record, expected, limit):
    """One unit in the last place of one float32 input, or ten limits in one result, must not go unnoticed."""
    sample, token = np.argwhere(inputs["mask"])[0] if "mask" in inputs else (0, 0)
    for name in ("q", "k", "v", "cotangent"):
        changed = inputs[name].copy()
        changed[sample, token, 0, 0] = np.nextafter(changed[sample, token, 0, 0], np.float32(np.inf))
        if not differing(make_expected({**inputs, name: changed}, record), expected, limit):
            yield f"negative control: a changed {name} passes"
    for name in expected:
        changed = expected[name].copy()
        finite = np.isfinite(changed)
        changed.flat[np.argmax(finite)] += 10 * limit * np.linalg.norm(changed[finite])
        if differing({**expected, name: changed}, expected, limit) != [name]:
            yield f"negative control: a changed {name} passes"


def goldens_of(out, kind):
    """Folders of the goldens of one kind; others may lie beside them."""
    records = sorted(out.glob("*/case.json"))
    return [path.parent.name for path in records if json.loads(path.read_text()).get("kind") == kind]


def verify_case(out, case, limit):
    record = json.loads((out / case / "case.json").read_text())
    inputs = load_file(out / case / "inputs.safetensors")
    expected = load_file(out / case / "expected.safetensors")
    recomputed = make_expected(inputs, record)
    wanted = {n: t for n, t in recomputed.items() if n in NEEDED_RESULTS | expected.keys()}
    complaints = [*check_sums(out, case), *check_seed(case, record, inputs)]
    for name in differing(wanted, expected, limit):
        if name in wanted and name in expected:
            error = relative_l2(expected[name], wanted[name])
            complaints.append(f"{name}: relative L2 {error:.2e} against the recomputed tensor, limit {limit:.0e}")
        else:
            complaints.append(f"{name}: {'missing' if name in wanted else 'not a result of attention'}")
    if not complaints:
        complaints += check_gradients(inputs, record, recomputed)
        complaints += check_negative_control(inputs, record, recomputed, limit)
    bitwise = sum(n in wanted and wanted[n].tobytes() == t.tobytes() for n, t in expected.items())
    print(f"{case}: {'FAIL' if complaints else 'ok'}, {bitwise} of {len(expected)} tensors equal to the last bit")
    for complaint in complaints:
        print(f"  {complaint}")
    return not complaints


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder that holds the case folders")
    parser.add_argument("--variant", choices=sorted(CASES), default="shared", help="which set to make")
    parser.add_argument("--seed", type=int, help=f"default: {DEFAULT_SEED}")
    parser.add_argument("--cases", nargs="+", metavar="CASE", help="default: all")
    parser.add_argument("--verify", action="store_true", help="write nothing; reload, recompute and compare")
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"--verify: relative L2 allowed, default {LIMIT}")
    args = parser.parse_args()
    if np.finfo(np.longdouble).eps > 2e-19:
        print("numpy's longdouble has no extended precision on this machine: use x86 Linux", file=sys.stderr)
        return 3
    if args.verify:
        out = args.out or HERE
        present = goldens_of(out, "attention")
        cases = args.cases or present
        if not cases or set(cases) - set(present):
            parser.error(f"{out} holds these attention cases: {', '.join(present) or 'none'}")
        return 0 if all([verify_case(out, case, args.limit) for case in cases]) else 1
    if args.out is None:
        parser.error("--out DIR is needed: making a set overwrites what is there")
    specs = CASES[args.variant]
    cases = args.cases or list(specs)
    unknown = sorted(set(cases) - set(specs))
    if unknown:
        parser.error(f"unknown case {', '.join(unknown)}; known: {', '.join(specs)}")
    seed = DEFAULT_SEED[args.variant] if args.seed is None else args.seed
    for case in cases:
        write_case(args.out / case, specs[case], seed, args.variant)
    write_sums(args.out, [case for case in specs if (args.out / case / "case.json").exists()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
