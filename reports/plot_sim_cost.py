#!/usr/bin/env python3
"""Turns the output of bench_sim_overhead into what is published.

    reports/plot_sim_cost.py RAW.json OUTDIR [--start VERIFY_START.md]

RAW.json is Google Benchmark's (--json RAW.json). Writes into OUTDIR: sim_cost.json (medians, least
and most, without host names and paths), sim_ratio.svg, sim_ranks.svg, sim_tokens.svg (those whose
benchmarks were run) and table.md. Standard library only.
"""
import argparse
import json
import pathlib
import re
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from line_chart import Panel, Series, draw  # noqa: E402

TARGET = 1.15  # sim/whole at sp=4
COLOURS = {"local": 4, "ulysses": 0, "ring": 1, "hybrid": 2, "allgather": 3, "hybrid_allgather": 5}
CONTEXT = ("date", "num_cpus", "load_avg", "commit", "machine", "device",
           "dtype", "backend", "shape", "torch")
# What Google Benchmark appends to the registered name.
SUFFIX = re.compile(r"(/iterations:\d+)?(/repeats:\d+)?(/manual_time|/process_time)?(/real_time)?$")


def count(cores):
    return f"{cores} core{'s' if cores > 1 else ''}"


def rounded(x):
    return float(f"{x:.4g}")


def is_counter(key, value):
    known = {"family_index", "per_family_instance_index", "repetitions", "threads", "iterations",
             "repetition_index"}
    return isinstance(value, (int, float)) and not isinstance(value, bool) and key not in known


def condense(raw):
    """One row a benchmark: medians of all numbers, least and most of the ratio or the time."""
    rows = {}
    for run in raw["benchmarks"]:
        if run.get("error_occurred"):
            sys.exit(f"plot_sim_cost: {run['name']} failed: {run.get('error_message')}")
        name = SUFFIX.sub("", run["run_name"])
        row = rows.setdefault(name, {"name": name})
        kind = run.get("aggregate_name")
        key = "ratio" if "ratio" in run else "real_time"
        if kind == "median":
            row["time_unit"] = run["time_unit"]
            row["runs"] = run["repetitions"]
            row.update({k: rounded(v) for k, v in run.items() if is_counter(k, v)})
            if key == "ratio":
                del row["cpu_time"]  # of both sides together; sim_cpu_ms and whole_cpu_ms tell more
        elif kind in ("min", "max"):
            row[f"{key}_{kind}"] = rounded(run[key])
    context = {k: raw["context"][k] for k in CONTEXT if k in raw["context"]}
    return {"format": "shardproof-sim-cost", "version": 1, "context": context,
            "rows": list(rows.values())}


def to_json(cost):
    head = json.dumps({k: v for k, v in cost.items() if k != "rows"}, indent=1)[:-2]
    rows = ",\n".join("  " + json.dumps(row) for row in cost["rows"])
    return f'{head},\n "rows": [\n{rows}\n ]\n}}\n'


def pick(cost, series):
    """Rows of one series, the parts of their names read: (row, mode, {"sp": 4, "cores": 1})."""
    found = []
    for row in cost["rows"]:
        first, *words = row["name"].split("/")
        if first != series:
            continue
        pairs = (w.split(":") for w in words if re.fullmatch(r"\w+:\d+", w))
        numbers = {k: int(v) for k, v in pairs}
        mode = next((w for w in words if w in COLOURS), "")
        found.append((row, mode, numbers))
    return found


def lines(rows, x, y, label, keep=lambda n: True, style=""):
    """One Series a mode, with its colour."""
    modes = list(dict.fromkeys(mode for _, mode, n in rows if keep(n)))
    out = []
    for mode in modes:
        points = [(n[x], row[y]) for row, m, n in rows if m == mode and keep(n)]
        out.append(Series(label.format(mode=mode), points, COLOURS.get(mode, 0), style))
    return out


def ratio_panel(rows, cores):
    mine = [(r, m, n) for r, m, n in rows if n["cores"] == cores]
    common = [(r, n) for r, m, n in mine if m == "local"]
    series = []
    for checks, style in ((1, ""), (0, "dashed")):
        start = [(n["sp"], r["ratio"]) for r, n in common if n["checks"] == checks]
        word = "{mode}, checked" if checks else "{mode}, no delivery checks"
        for s in lines([t for t in mine if t[1] != "local"], "sp", "ratio", word,
                       lambda n, c=checks: n["checks"] == c, style):
            series.append(Series(s.label, start + s.points, s.colour, s.style))
    ratios = [row["ratio"] for row, _, _ in rows]
    return Panel(f"{count(cores)} on both sides", "sequence-parallel ranks",
                 "time with ranks / time without", series, also=(min(ratios), max(ratios)),
                 marks=[(1.0, ""), (TARGET, "target at 4")])


def plot_ratio(cost):
    rows = pick(cost, "attention_sim")
    cores = sorted({n["cores"] for _, _, n in rows})[:2]
    panels = [panel for panel in (ratio_panel(rows, c) for c in cores) if panel.series]
    return draw(panels) if panels else None


def plot_ranks(cost):
    rows = pick(cost, "attention_ranks")
    if not rows:
        return None
    series = []
    for i, cores in enumerate(sorted({n["cores"] for _, _, n in rows})[:2]):
        mine = [(r, n) for r, _, n in rows if n["cores"] == cores]
        for word, key, style in (("with", "real_time", ""), ("without", "whole_ms", "dashed")):
            points = [(n["sp"], r[key]) for r, n in mine]
            series.append(Series(f"{word} ranks, {count(cores)}", points, i, style))
    panels = [Panel("the same work on more and more ranks", "ranks", "ms (forward + backward)",
                    series, from_zero=True)]
    calls = pick(cost, "hand_over")
    if calls:
        series = []
        for i, cores in enumerate(sorted({n["cores"] for _, _, n in calls})[:2]):
            points = [(n["ranks"], 1e6 * r["s_per_rank_call"]) for r, _, n in calls
                      if n["cores"] == cores]
            series.append(Series(f"with ranks, {count(cores)}", points, i))
        panels.append(Panel("one call of one rank: post, match, wake", "ranks in the group",
                            "µs a rank and all-to-all", series, from_zero=True))
    return draw(panels)


def plot_tokens(cost):
    rows = pick(cost, "attention_tokens")
    if not rows:
        return None
    whole = {}
    for row, _, n in rows:
        whole.setdefault(n["S"], []).append(row["whole_ms"])
    medians = [(tokens, statistics.median(ms)) for tokens, ms in whole.items()]
    base = Series("without ranks", medians, 4, "dashed")
    return draw([
        Panel("time of one forward + backward, sp = 4, 1 core", "tokens", "ms",
              lines(rows, "S", "real_time", "{mode}") + [base], log_y=True),
        Panel("what the ranks add", "tokens", "time with ranks / time without",
              lines(rows, "S", "ratio", "{mode}"), marks=[(1.0, ""), (TARGET, "target")])])


def main_table(cost):
    out = ["| mode | sp | cores | delivery checks | without ms | with ranks ms | ratio (median) "
           "| least–most | CPU-time ratio |",
           "| --- | ---: | ---: | --- | ---: | ---: | ---: | --- | ---: |"]
    for row, mode, n in pick(cost, "attention_sim"):
        out.append(f"| {mode} | {n['sp']} | {n['cores']} | {'on' if n['checks'] else 'off'} "
                   f"| {row['whole_ms']:.1f} | {row['real_time']:.1f} | {row['ratio']:.3f} "
                   f"| {row['ratio_min']:.2f}–{row['ratio_max']:.2f} | {row['cpu_ratio']:.3f} |")
    at_four = [row["ratio"] for row, _, n in pick(cost, "attention_sim") if n["sp"] == 4]
    if at_four:
        worst = max(at_four)
        out += ["", f"Target: a ratio of at most {TARGET} at sp = 4. The worst is {worst:.3f}: "
                f"{'met' if worst <= TARGET else 'missed'}."]
    return out


def series_table(cost, series, key, title):
    rows = pick(cost, series)
    if not rows:
        return []
    out = ["", f"## {title}", "",
           f"| mode | {key} | cores | without ms | with ranks ms | ratio | least–most |",
           "| --- | ---: | ---: | ---: | ---: | ---: | --- |"]
    for row, mode, n in rows:
        out.append(f"| {mode} | {n[key]} | {n['cores']} | {row['whole_ms']:g} "
                   f"| {row['real_time']:g} | {row['ratio']:.2f} "
                   f"| {row['ratio_min']:.2f}–{row['ratio_max']:.2f} |")
    return out


def micro_table(cost):
    out = []
    for series, key in (("hand_over", "s_per_rank_call"), ("make_world", ""), ("run_nothing", ""),
                        ("verify_case", "")):
        for row, _, _ in pick(cost, series):
            to_us = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}[row["time_unit"]]
            us = 1e6 * row[key] if key else row["real_time"] * to_us
            out.append(f"| `{row['name']}` | {us:.1f} |")
    head = ["", "## The simulator by itself", "",
            "`hand_over` is per rank and collective; the others are per execution.", "",
            "| what | µs (median) |", "| --- | ---: |"]
    return head + out if out else []


def to_table(cost, start):
    c = {key: cost["context"].get(key, "?") for key in CONTEXT}
    out = ["# Cost of simulated ranks: numbers", "",
           f"- date {c['date']}, commit {c['commit']}, LibTorch {c['torch']}",
           f"- machine: {c['machine']}; load averages at the start {c['load_avg']}",
           f"- attention, forward + backward: B=1 {c['shape']}, {c['dtype']}, {c['device']}, "
           f"backend {c['backend']}", "",
           "## With virtual ranks / without, same work, same cores", ""]
    out += main_table(cost)
    out += series_table(cost, "attention_ranks", "sp", "Fixed work, more ranks (S=1024 H=64 D=16)")
    out += series_table(cost, "attention_tokens", "S", "Four ranks, more tokens")
    out += micro_table(cost)
    if start:
        out += ["", "## From process start to verdict", "", start.rstrip()]
    return "\n".join(out) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("raw", type=pathlib.Path)
    parser.add_argument("outdir", type=pathlib.Path)
    parser.add_argument("--start", type=pathlib.Path, help="output of bench/verify_start.sh")
    args = parser.parse_args()
    cost = condense(json.loads(args.raw.read_text()))
    args.outdir.mkdir(parents=True, exist_ok=True)
    (args.outdir / "sim_cost.json").write_text(to_json(cost))
    start = args.start.read_text() if args.start else ""
    (args.outdir / "table.md").write_text(to_table(cost, start))
    for name, plot in {"sim_ratio": plot_ratio, "sim_ranks": plot_ranks,
                       "sim_tokens": plot_tokens}.items():
        svg = plot(cost)
        if svg:
            (args.outdir / f"{name}.svg").write_text(svg)


if __name__ == "__main__":
    main()
