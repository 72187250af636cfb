#!/bin/sh
# Measures what simulating ranks costs on this machine and writes OUTDIR/{sim_cost.json, table.md,
# *.svg}. Takes about 20 minutes on 2 cores; nothing else should run meanwhile.
#
# Usage: bench/publish_sim_cost.sh OUTDIR [OPTIONS OF bench_sim_overhead...]
#   bench/publish_sim_cost.sh reports/published/2026-01-31-sim-cost
#   bench/publish_sim_cost.sh out --device cuda --main-only
# Environment: SHARDPROOF_BUILD, the build folder (default build/release of this checkout).
set -eu
here=$PWD
cd "$(dirname "$0")/.."
case ${1-} in
  '' | -*) echo "usage: bench/publish_sim_cost.sh OUTDIR [OPTIONS...]" >&2; exit 2 ;;
  /*) out=$1 ;;
  *) out=$here/$1 ;;
esac
shift
build=${SHARDPROOF_BUILD:-build/release}
program=$build/bin/bench_sim_overhead
[ -x "$program" ] || {
  echo "publish_sim_cost: no $program; build it (./shardproof build) or set SHARDPROOF_BUILD" >&2
  exit 3
}

commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
if [ -n "$(git status --porcelain 2>/dev/null)" ]; then commit=$commit+changes; fi
machine="$(nproc) cores of $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)"
case " $* " in
  *' cuda '* | *'=cuda '*)
    machine="$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1) with $machine" ;;
esac

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$program" --json "$scratch/raw.json" "--benchmark_context=commit=$commit" \
  "--benchmark_context=machine=$(echo "$machine" | tr ',=' '  ')" "$@"
SHARDPROOF_BUILD=$build bench/verify_start.sh >"$scratch/start.md"
cat "$scratch/start.md"
python3 reports/plot_sim_cost.py "$scratch/raw.json" "$out" --start "$scratch/start.md"
echo "written: $out"
