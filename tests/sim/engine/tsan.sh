#!/bin/sh
# Runs a program that was built with ThreadSanitizer, without any suppression.
#
#   tsan.sh clean PROGRAM [ARGUMENT...]   passes if the program does and no race is reported
#   tsan.sh race FUNCTION PROGRAM         passes if exactly one race is reported, in FUNCTION
set -u
export TSAN_OPTIONS="exitcode=66 halt_on_error=0"

# ThreadSanitizer of older compilers cannot live with the wide address randomisation of newer
# kernels; where it may be turned off for one program, it is.
fixed_addresses=
if command -v setarch >/dev/null && setarch "$(uname -m)" -R true 2>/dev/null; then
  fixed_addresses="setarch $(uname -m) -R"
fi

mode=$1
shift
case $mode in
  clean)
    exec $fixed_addresses "$@"
    ;;
  race)
    function=$1
    shift
    output=$($fixed_addresses "$@" 2>&1)
    status=$?
    races=$(printf '%s\n' "$output" | grep -c 'WARNING: ThreadSanitizer: data race')
    other=$(printf '%s\n' "$output" | grep -c 'WARNING: ThreadSanitizer: [^d]')
    if [ $status -eq 66 ] && [ "$races" -eq 1 ] && [ "$other" -eq 0 ] &&
       printf '%s\n' "$output" | grep -q "#0 .*$function"; then
      echo "the planted race in $function was reported, and nothing else"
      exit 0
    fi
    printf '%s\n' "$output"
    echo "expected exit status 66 and one data race in $function; got status $status, $races data races, $other other reports" >&2
    exit 1
    ;;
  *)
    echo "tsan.sh: unknown mode '$mode'; expected clean or race" >&2
    exit 2
    ;;
esac
