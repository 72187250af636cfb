#!/bin/sh
# From the start of the process to its verdict: what a person or a hook waits for. Prints the least,
# the median and the largest wall time of RUNS processes, and the largest resident memory.
#
# Usage: bench/verify_start.sh [RUNS]     (default 15)
# Environment: SHARDPROOF_BUILD, the build folder (default build/release of this checkout).
# The resident memory needs /usr/bin/time (Debian package time); without it a dash is printed.
set -eu
cd "$(dirname "$0")/.."
runs=${1:-15}
program=${SHARDPROOF_BUILD:-build/release}/bin/shardproof-cli
case $runs in
  '' | *[!0-9]* | 0) echo "verify_start: RUNS is '$runs'; expected a positive number" >&2; exit 2 ;;
esac
[ -x "$program" ] || {
  echo "verify_start: no $program; build it (./shardproof build) or set SHARDPROOF_BUILD" >&2
  exit 3
}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# one WANTED_CODE ARGUMENTS...: appends milliseconds to times and, where it can, KB to sizes.
one() {
  wanted=$1
  shift
  code=0
  start=$(date +%s%N)
  if [ -x /usr/bin/time ]; then
    /usr/bin/time -q -f %M -o "$scratch/size" "$program" "$@" >"$scratch/log" 2>&1 || code=$?
  else
    "$program" "$@" >"$scratch/log" 2>&1 || code=$?
  fi
  end=$(date +%s%N)
  if [ "$code" -ne "$wanted" ]; then
    cat "$scratch/log" >&2
    echo "verify_start: '$*' ended with $code; expected $wanted" >&2
    exit 4
  fi
  echo "$start $end" | awk '{ printf "%.1f\n", ($2 - $1) / 1e6 }' >>"$scratch/times"
  if [ -s "$scratch/size" ]; then cat "$scratch/size" >>"$scratch/sizes"; fi
}

# row LABEL WANTED_CODE ARGUMENTS...
row() {
  label=$1
  shift
  : >"$scratch/times"
  : >"$scratch/sizes"
  one "$@" # reads the libraries into the page cache
  : >"$scratch/times"
  i=0
  while [ "$i" -lt "$runs" ]; do
    one "$@"
    i=$((i + 1))
  done
  size=$(sort -n "$scratch/sizes" | awk 'END { if (NR) printf "%.0f", $1 / 1024; else print "-" }')
  sort -n "$scratch/times" | awk -v label="$label" -v size="$size" '
    { t[NR] = $1 }
    END {
      m = NR % 2 ? t[(NR + 1) / 2] : (t[NR / 2] + t[NR / 2 + 1]) / 2
      printf "| %s | %d | %.0f | %.0f | %.0f | %s |\n", label, NR, t[1], m, t[NR], size
    }'
}

echo "| process start to verdict | runs | least ms | median ms | largest ms | largest RSS MiB |"
echo "| --- | ---: | ---: | ---: | ---: | ---: |"
row 'verify attention --quick' 0 verify attention --quick --quiet
row 'verify --golden .../attention_keymask --sp 4' 0 \
  verify --golden datasets/goldens/attention_keymask --sp 4 --quiet
for split in ulysses2/fp32/ragged ulysses4/fp32/ragged ulysses8/fp32/ragged.headpad; do
  row "verify --case models/qwenimage/ulysses/$split" 0 \
    verify --case "models/qwenimage/ulysses/$split" --quiet
done
row 'verify models --quick' 0 verify models --quick --quiet
# A suite that does not exist is refused once LibTorch is loaded: what remains above is our work.
row 'loading LibTorch alone' 2 verify no-such-suite
row 'help' 0 --help
