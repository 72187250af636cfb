#!/bin/sh
# run.sh BUILD_DIR: installs the finished build below a temporary prefix, then configures, builds and
# runs the consumer beside this file against it. Exit code 0 when all of it works.
set -eu

if [ $# -ne 1 ] || [ ! -f "$1/CMakeCache.txt" ]; then
  echo "usage: run.sh BUILD_DIR (a build folder of Shardproof, which holds CMakeCache.txt)" >&2
  exit 2
fi
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd -P)
build=$(CDPATH='' cd -- "$1" && pwd -P)

work=$(mktemp -d "${TMPDIR:-/tmp}/shardproof_package.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

cached() { sed -n "s/^$1:[A-Z]*=//p" "$build/CMakeCache.txt"; }

# Libraries that were built with a sanitizer need it in the program that links them.
sanitize=$(cached SHARDPROOF_SANITIZE)

cmake --install "$build" --prefix "$work/prefix" >"$work/install.log" || {
  cat "$work/install.log" >&2
  exit 1
}
# The package must know by itself where its torch is.
unset SHARDPROOF_TORCH
cmake -S "$here" -B "$work/build" -G Ninja -DCMAKE_PREFIX_PATH="$work/prefix" \
  -DCMAKE_BUILD_TYPE="$(cached CMAKE_BUILD_TYPE)" -DCMAKE_CXX_COMPILER="$(cached CMAKE_CXX_COMPILER)" \
  -DCMAKE_CXX_FLAGS="${sanitize:+-fsanitize=$sanitize}"
cmake --build "$work/build"
"$work/build/consumer"

# The installed program finds its module and its libraries.
if [ -x "$work/prefix/bin/shardproof-cli" ]; then
  "$work/prefix/bin/shardproof-cli" verify --help >"$work/help.txt" || {
    echo "the installed shardproof-cli verify --help failed; expected exit code 0" >&2
    exit 1
  }
fi
