#!/bin/sh
# tidy.sh [FILE...]: clang-tidy-14 with the project's .clang-tidy over the given sources, or over all
# of src, sim, verify and bench (10 minutes on one core). Not part of the ordinary test run for that
# reason. Needs a build tree of its own: clang cannot read GCC's precompiled header.
# Exit codes: 0 nothing found, 1 findings, 3 clang-tidy-14 is missing.
set -eu
cd "$(dirname "$0")/../.."
command -v clang-tidy-14 >/dev/null || {
  echo "tidy: clang-tidy-14 is missing; install the package clang-tidy-14" >&2
  exit 3
}
torch=$(sed -n 's/^SHARDPROOF_TORCH:[A-Z]*=//p' build/release/CMakeCache.txt 2>/dev/null || true)
cmake -S . -B build/tidy -G Ninja -DCMAKE_BUILD_TYPE=Release -DSHARDPROOF_TORCH="$torch" \
  -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON -DSHARDPROOF_BUILD_TESTS=OFF >/dev/null
[ $# -gt 0 ] || set -- $(find src sim verify bench -name '*.cc' | sort)
status=0
printf '%s\n' "$@" | xargs -n 1 -P "${JOBS:-1}" clang-tidy-14 -p build/tidy --quiet 2>/dev/null ||
  status=1
exit $status
