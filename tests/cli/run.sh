#!/bin/sh
# run.sh [--update] PROGRAM SOURCE_DIR [NAME...]
#
# Runs every transcript beside this file and compares what the program says with what is written
# there, then runs the commands that README.md and docs/*.md show and checks their exit codes. With
# NAMEs: those transcripts only. --update writes the transcripts anew from what came out: read the
# difference before it is committed. Format and rules: README.md beside this file.
#
# Exit codes: 0 all as written, 1 not, 2 bad usage.
set -u

update=no
if [ "${1-}" = --update ]; then
  update=yes
  shift
fi
if [ $# -lt 2 ] || [ ! -x "$1" ] || [ ! -e "$2/CMakeLists.txt" ]; then
  echo "usage: run.sh [--update] PROGRAM SOURCE_DIR [NAME...]" >&2
  exit 2
fi
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd -P)
program=$(CDPATH='' cd -- "$(dirname -- "$1")" && pwd -P)/${1##*/}
source=$(CDPATH='' cd -- "$2" && pwd -P)
shift 2

work=$(mktemp -d "${TMPDIR:-/tmp}/shardproof_cli.XXXXXX") || exit 2
work=$(CDPATH='' cd -- "$work" && pwd -P)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

mkdir "$work/bin" "$work/blocks"
ln -s "$program" "$work/bin/shardproof"
PATH=$work/bin:$PATH
GOLDENS=$source/datasets/goldens
LC_ALL=C
export PATH GOLDENS LC_ALL
failures=0

# What differs between two runs or two machines; README.md explains each rule.
normalise() {
  sed -e "s|$work/run|DIR|g" -e "s|$source|SOURCE|g" \
    -e 's/, [0-9.]* s, seed/, # s, seed/' \
    -e 's/, commit [^ ]*$/, commit #/' \
    -e 's/worst error [^ ]* of its limit\( ([^)]*)\)*/worst error # of its limit/' \
    -e 's/  *[0-9][^ ]*  \([a-z]*\(:grad\)*\) in [^ ]*$/  #  # in #/' \
    -e 's/[[:space:]]*$//'
}

# ---- transcripts -------------------------------------------------------------------------------

# Cuts a transcript into $work/blocks/<n>.command and <n>.expected; what stands above a command
# goes to <n>.before.
cut_transcript() { # FILE
  rm -f "$work"/blocks/*
  awk -v out="$work/blocks/" '
    BEGIN { n = 1; state = "between" }
    /^\$ / && state != "output" { state = "command"; print substr($0, 3) >(out n ".command"); next }
    state == "command" && /^> / { print substr($0, 3) >(out n ".command"); next }
    state == "between" { print >(out n ".before"); next }
    { state = "output"; print >(out n ".expected") }
    /^\[exit [0-9]+\]$/ { ++n; state = "between" }
  ' "$1"
}

run_command() { # NUMBER
  (cd "$work/run" && sh "$work/blocks/$1.command") </dev/null >"$work/output" 2>&1
  echo "[exit $?]" >>"$work/output"
  normalise <"$work/output" >"$work/blocks/$1.actual"
}

run_transcript() { # FILE
  cut_transcript "$1"
  rm -rf "$work/run"
  mkdir "$work/run"
  : >"$work/actual"
  n=1
  while [ -e "$work/blocks/$n.command" ]; do
    run_command "$n"
    if [ -e "$work/blocks/$n.before" ]; then cat "$work/blocks/$n.before" >>"$work/actual"; fi
    sed -e '1s/^/$ /' -e '2,$s/^/> /' "$work/blocks/$n.command" >>"$work/actual"
    cat "$work/blocks/$n.actual" >>"$work/actual"
    n=$((n + 1))
  done
  if [ -e "$work/blocks/$n.before" ]; then cat "$work/blocks/$n.before" >>"$work/actual"; fi
  commands=$((n - 1))
  if [ $commands -eq 0 ]; then
    echo "FAILED  ${1##*/}: no such transcript, or none of its lines begins with \"\$ \""
    failures=$((failures + 1))
  elif cmp -s "$1" "$work/actual"; then
    echo "ok      ${1##*/}: $commands commands"
  elif [ $update = yes ]; then
    cat "$work/actual" >"$1"
    echo "updated ${1##*/}: $commands commands"
  else
    echo "FAILED  ${1##*/}: - is what the transcript says, + what came out"
    diff -u "$1" "$work/actual" | sed 1,2d
    failures=$((failures + 1))
  fi
}

# ---- commands in the documentation -------------------------------------------------------------

# Prints "<exit code> <command>" for each `$ ./shardproof ...` of the ```console blocks of a file.
# The code is 0, or what a following `$ echo $?` shows.
documented_commands() { # FILE
  awk '
    function flush() { if (command != "") print code, command; command = ""; code = 0 }
    /^```console$/ { inside = 1; next }
    /^```/ { if (inside) flush(); inside = 0; next }
    !inside { next }
    asked { code = $0; asked = 0; flush(); next }
    $0 == "$ echo $?" { asked = 1; next }
    /^\$ / { flush(); open = 0 }
    /^\$ \.\/shardproof / { command = substr($0, 3); open = 1 }
    open && !/^\$ / && continued { command = command " " $0 }
    { continued = sub(/ \\$/, "", command) }
    END { flush() }
  ' "$1"
}

run_documented() { # CODE COMMAND
  case $2 in
    './shardproof setup'* | './shardproof build'* | './shardproof test'* | './shardproof clean'*)
      return
      ;;
  esac
  (cd "$work/run" && eval "shardproof ${2#./shardproof }") </dev/null >"$work/output" 2>&1
  code=$?
  ran=$((ran + 1))
  if [ "$code" -eq "$1" ]; then return; fi
  # A machine without a CUDA device says so, which is no mistake of the page.
  case $2 in *'--device cuda'*) if [ "$code" -eq 3 ]; then return; fi ;; esac
  echo "FAILED  $name: exit code $code, expected $1: $2"
  tail -n 20 "$work/output"
  failures=$((failures + 1))
}

run_page() { # FILE
  name=${1#"$source"/}
  ran=0
  before=$failures
  documented_commands "$1" >"$work/commands"
  while read -r code command; do
    if grep -qxF -e "$code $command" "$work/done"; then continue; fi
    echo "$code $command" >>"$work/done"
    run_documented "$code" "$command"
  done <"$work/commands"
  if [ $failures -eq "$before" ]; then echo "ok      $name: $ran commands"; fi
}

# ---- all ---------------------------------------------------------------------------------------

if [ $# -gt 0 ]; then
  for name in "$@"; do run_transcript "$here/$name.transcript"; done
else
  for file in "$here"/*.transcript; do run_transcript "$file"; done
  rm -rf "$work/run"
  mkdir "$work/run"
  ln -s "$source/datasets" "$work/run/datasets" # pages name files relative to the checkout
  : >"$work/done"
  for page in "$source/README.md" "$source/CONTRIBUTING.md" "$source"/docs/*.md \
    "$source/datasets/README.md"; do
    run_page "$page"
  done
  if [ ! -s "$work/done" ]; then
    echo "FAILED  the pages show no command; expected some in \`\`\`console blocks of README.md"
    failures=$((failures + 1))
  fi
fi
if [ $failures -gt 0 ]; then
  echo "$failures failed"
  exit 1
fi
