#!/bin/bash
# two_hosts.sh PROGRAM: a world over two hosts, which are network namespaces joined by a cable. Needs
# root and iproute2. Exit codes: 0 as expected, 1 not, 77 namespaces cannot be made here.
set -u
program=$1
a=shardproof-a-$$
b=shardproof-b-$$
work=$(mktemp -d)
cleanup() {
  ip netns pids $a 2>/dev/null | xargs -r kill -9 2>/dev/null
  ip netns pids $b 2>/dev/null | xargs -r kill -9 2>/dev/null
  ip netns del $a 2>/dev/null
  ip netns del $b 2>/dev/null
  rm -rf "$work"
}
trap cleanup EXIT

ip netns add $a 2>/dev/null && ip netns add $b &&
  ip link add spa$$ netns $a type veth peer name spb$$ netns $b || {
  echo "network namespaces cannot be made here"
  exit 77
}
for host in "$a spa$$ 10.77.0.1" "$b spb$$ 10.77.0.2"; do
  set -- $host
  ip -n $1 addr add $3/24 dev $2
  ip -n $1 link set $2 up
  ip -n $1 link set lo up
done

failures=0
# both NAME WANTED_CODE TEXT COMMAND_A -- COMMAND_B: at once on the two hosts.
run() { # NAMESPACE LOG COMMAND...
  local namespace=$1 log=$2
  shift 2
  timeout 60 ip netns exec $namespace "$@" >"$work/$log" 2>&1
}
report() { # NAME CODE WANTED TEXT
  if [ "$2" -eq "$3" ] && cat "$work"/log.* | grep -qE -- "$4"; then
    echo "ok      $1"
  else
    echo "FAILED  $1: exit code $2, expected $3 and '$4'"
    sed 's/^/        /' "$work"/log.* | head -20
    failures=$((failures + 1))
  fi
}

launch="$program launch -n 2 --nodes 2 --rdzv 10.77.0.1:29517"
what="verify attention --quick --transport gloo --quiet --timeout 10"
run $b log.b $launch --node-rank 1 -- $what &
run $a log.a $launch --node-rank 0 -- $what
code=$?
wait
report 'two hosts, two ranks each' $code 0 '\[0\] holds'

run $b log.b env GLOO_SOCKET_IFNAME=spb$$ $launch --node-rank 1 -- $what &
run $a log.a env GLOO_SOCKET_IFNAME=spa$$ $launch --node-rank 0 -- $what
code=$?
wait
report 'interfaces by name' $code 0 '\[0\] holds'

# The cable is pulled while they compute.
long="verify models --transport gloo --quiet --timeout 6"
run $b log.b $launch --node-rank 1 -- $long &
run $a log.a $launch --node-rank 0 -- $long &
first=$!
sleep 4
ip -n $b link set spb$$ down
wait $first
report 'the cable is pulled (timeout 6 s)' $? 4 'has not answered|imed out|failed'
wait

ip -n $b link set spb$$ up
run $b log.b $launch --node-rank 1 -- verify attention --quick --transport gloo --timeout 3
report 'node 0 is not there (timeout 3 s)' $? 3 'is rank 0 running'
[ $failures -eq 0 ]
