#!/bin/bash
# launch.sh PROGRAM SOURCE_DIR: worlds of real processes over Gloo. Runs that hold, and every way of
# dying; each must end within its limit, with a message, and leave no process behind. Prints the
# time to diagnosis of each. Exit codes: 0 all as expected, 1 not, 77 nothing to test (no Gloo).
set -u
program=$1
source=$2
work=$(mktemp -d)
trap 'kill -9 $(jobs -p) 2>/dev/null; rm -rf "$work"' EXIT
failures=0
mark=shardproof-launch-test-$$ # in the command lines of all ranks, to find those left behind

fail() {
  echo "FAILED  $1"
  sed 's/^/        /' "$work/log" | head -20
  failures=$((failures + 1))
}

milliseconds() { echo $(($(date +%s%N) / 1000000)); }

# check NAME WANTED_CODE TEXT CODE START: the log must hold TEXT; nobody may be left.
check() {
  local name=$1 wanted=$2 text=$3 code=$4 start=$5
  local took=$(($(milliseconds) - start))
  if [ "$code" -ne "$wanted" ]; then
    fail "$name: exit code $code; expected $wanted"
  elif [ -n "$text" ] && ! grep -qE -- "$text" "$work/log"; then
    fail "$name: no '$text' in what was said"
  elif pgrep -f -- "$mark" >/dev/null; then
    fail "$name: processes were left behind"
    pkill -9 -f -- "$mark"
  else
    printf 'ok      %-44s %6d ms\n' "$name" "$took"
  fi
}

# expect NAME WANTED_CODE TEXT COMMAND...
expect() {
  local name=$1 wanted=$2 text=$3 start code
  shift 3
  start=$(milliseconds)
  timeout 100 "$@" >"$work/log" 2>&1
  code=$?
  check "$name" "$wanted" "$text" "$code" "$start"
}

verify() { echo verify "$@" --transport gloo --quiet --json "$work/$mark.json"; }

timeout 60 "$program" launch -n 1 -- $(verify attention --dtype fp64 --sp 1) >"$work/log" 2>&1
if grep -q 'has no Gloo' "$work/log"; then
  echo "this build has no Gloo"
  exit 77
fi

# Runs that hold.
for n in 2 3 4; do
  expect "attention on $n ranks" 0 '\[0\] holds' "$program" launch -n $n -- $(verify attention --quick)
  expect "models on $n ranks" 0 '\[0\] holds' "$program" launch -n $n -- $(verify models --quick)
done
for n in 2 4; do
  expect "training on $n ranks" 0 '\[0\] holds' "$program" launch -n $n -- $(verify training --quick)
done
expect 'goldens on 2 ranks' 0 '\[0\] holds' "$program" launch -n 2 -- $(verify goldens)
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
for n in 2 3 4; do
  if command -v mpirun >/dev/null; then
    expect "attention and models by mpirun, $n ranks" 0 holds \
      mpirun --oversubscribe -n $n "$program" $(verify attention models --quick)
  else
    echo "skipped mpirun: not there"
  fi
  if command -v torchrun >/dev/null; then
    expect "attention and models by torchrun, $n ranks" 0 holds torchrun --no-python \
      --nproc-per-node $n --master-port $((20000 + ($$ + 7919 + n) % 20000)) \
      "$program" $(verify attention models --quick)
  else
    echo "skipped torchrun: not there"
  fi
done
expect 'simulator and ranks compared' 0 '\[0\] holds' \
  "$program" launch -n 2 -- verify transports --quick --transport gloo --quiet --json "$work/$mark.json"

# A wait that is missing, while the other rank is late: the result must not look right.
expect 'a missing wait' 1 '\[0\] VIOLATED' "$program" launch -n 2 -- $(verify attention --dtype fp32 \
  --case attention/joint/ulysses/ulysses2/fp32/textrep.C \
  --plant skip-wait,rank=0 --plant delay,rank=1)
expect 'the same, waited for' 0 '\[0\] holds' "$program" launch -n 2 -- $(verify attention \
  --case attention/joint/ulysses/ulysses2/fp32/textrep.C --plant delay,rank=1)

# What one rank's end means to the others. Ranks by hand: no launcher helps.
port=$((20000 + $$ % 20000))
next_world() { # another port, no output of earlier ranks
  port=$((port + 1))
  rm -f "$work"/log.[0-9]
}
rank() { # RANK SIZE ARGUMENTS...: in the background, its output in log.RANK
  local r=$1 size=$2
  shift 2
  RANK=$r WORLD_SIZE=$size LOCAL_RANK=$r LOCAL_WORLD_SIZE=$size MASTER_ADDR=127.0.0.1 \
    MASTER_PORT=$port "$program" $(verify "$@") >"$work/log.$r" 2>&1 &
}
ends() { # NAME WANTED_CODE TEXT PID [OTHER_PID]: waits for a rank; then for another one, however it ends
  local start code took
  start=$(milliseconds)
  wait "$4"
  code=$?
  took=$(($(milliseconds) - start))
  [ $# -lt 5 ] || wait "$5" 2>/dev/null
  cat "$work"/log.[0-9] >"$work/log"
  check "$1" "$2" "$3" "$code" $(($(milliseconds) - took))
}

for victim in 1 0; do
  next_world
  rank 0 2 models --timeout 8; first=$!
  rank 1 2 models --timeout 8; second=$!
  sleep 2
  if [ $victim -eq 1 ]; then dead=$second alive=$first; else dead=$first alive=$second; fi
  kill -9 $dead
  wait $dead 2>/dev/null
  ends "rank $victim is killed (SIGKILL)" 4 "rank $victim|onnection" $alive
done

next_world
rank 0 2 models --timeout 4; first=$!
rank 1 2 models --timeout 4; second=$!
sleep 2
kill -STOP $second
(sleep 8; kill -9 $second) 2>/dev/null &
ends 'rank 1 hangs in compute (timeout 4 s)' 4 'rank 1 has not answered|imed out|rank 0 failed' $first $second

next_world
rank 0 2 attention --quick --timeout 8 --plant kill,rank=1,call=9; first=$!
rank 1 2 attention --quick --timeout 8 --plant kill,rank=1,call=9; second=$!
ends 'rank 1 throws in its program' 4 'rank 1 failed after .* killed by the fault' \
  $first $second

next_world
rank 0 2 attention --quick --timeout 4 --plant hang,rank=1,call=8; first=$!
rank 1 2 attention --quick --timeout 4 --plant hang,rank=1,call=8; second=$!
ends 'rank 1 computes for ever (timeout 4 s)' 4 'rank 0 failed after .* rank 1: [0-9]+ collective|rank 1: no collective' \
  $first $second

next_world
rank 0 2 attention --quick --timeout 3
ends 'rank 1 never starts (timeout 3 s)' 3 '1 of 2 ranks have not come within 3 s: rank 1' $!

next_world
rank 0 2 attention --quick --timeout 5; first=$!
rank 1 2 attention --quick --timeout 5 --seed 2
ends 'ranks with other arguments' 2 'ranks 0 and 1 do not run the same' $! $first

next_world
rank 0 3 attention --quick --timeout 5; first=$!
rank 1 2 attention --quick --timeout 5
ends 'worlds of other sizes' 2 'ranks 0 and 1 do not run the same' $! $first

next_world
python3 -c "
import socket, time
s = socket.socket(); s.bind(('', $port)); s.listen(); time.sleep(20)" &
holder=$!
sleep 0.5
rank 0 2 attention --quick --timeout 5
ends 'port in use' 3 'cannot serve the store at 127.0.0.1' $!
kill $holder
wait $holder 2>/dev/null

next_world
rank 1 2 attention --quick --timeout 3
ends 'no store (timeout 3 s)' 3 'is rank 0 running' $!

# The launcher.
expect 'a rank ends with an error' 2 "unknown suite 'atention'" \
  "$program" launch -n 2 -- verify atention --transport gloo
expect 'a case that all ranks refuse' 2 'runs on cuda' \
  "$program" launch -n 2 -- $(verify attention --quick --backend cudnn)
expect 'a command that is not there' 3 "cannot run '/nowhere/$mark'" \
  "$program" launch -n 2 -- /nowhere/$mark
expect 'no world around' 2 'no world of processes' "$program" verify attention --transport gloo
start=$(milliseconds)
timeout 60 "$program" launch -n 2 -- $(verify models) >"$work/log" 2>&1 &
launcher=$!
sleep 2
pkill -INT -P $launcher 2>/dev/null || kill -INT $launcher
wait $launcher
code=$?
check 'the launcher is interrupted' 130 '' $code $start
timeout 60 "$program" launch -n 2 -- $(verify models) >"$work/log" 2>&1 &
launcher=$!
sleep 2
start=$(milliseconds)
pkill -9 -P $launcher
wait $launcher 2>/dev/null
sleep 1
check 'the launcher is killed' 137 '' 137 $start

[ $failures -eq 0 ] || { echo "$failures failed"; exit 1; }
