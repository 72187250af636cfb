#!/usr/bin/env bash
# Shows that a machine with nothing but Debian 12 and a network can run Shardproof: makes a minimal
# Debian in a folder, puts a checkout in it and runs there
#   ./shardproof verify attention --quick
#   ./shardproof test
# Needs root, debootstrap, 6 GB of disk and a package source for Debian 12, which it takes from this
# machine's own apt configuration. Not part of `./shardproof test`: it takes long and needs root.
#
# Exit codes: 0 both commands succeeded, 1 one failed, 2 bad usage, 3 this machine cannot do it.
set -euo pipefail

readonly suite=bookworm
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
verify_only=no worktree=no keep=no tree=

usage() {
  cat <<END
Usage: tests/bootstrap/bare_debian.sh [--verify-only] [--worktree] [--keep] [--tree DIR]
  --verify-only   do not run ./shardproof test
  --worktree      take the files as they are now, not the commit HEAD
  --keep          leave the tree where it is
  --tree DIR      where to make it (default: a new folder in \${TMPDIR:-/tmp}); must not exist
END
}

say() { printf 'bare_debian: %s\n' "$*" >&2; }
die() { # CODE MESSAGE...
  local code=$1
  shift
  say "$@"
  exit "$code"
}

while (($#)); do
  case $1 in
    --verify-only) verify_only=yes ;;
    --worktree) worktree=yes ;;
    --keep) keep=yes ;;
    --tree)
      (($# > 1)) || die 2 "--tree needs a folder"
      tree=$2
      shift
      ;;
    -h | --help)
      usage
      exit 0
      ;;
    *)
      usage >&2
      die 2 "unknown argument '$1'"
      ;;
  esac
  shift
done

[[ $(id -u) -eq 0 ]] || die 3 "needs root to make a Debian tree and enter it; run it with sudo"
for command in debootstrap chroot git tar mount; do
  command -v "$command" >/dev/null || die 3 "needs the command $command; install it and run again"
done

# ---- what this machine knows about its network ---------------------------------------------------

# The first address from which this machine's apt takes the suite (both notations of apt's sources).
find_mirror() {
  shopt -s nullglob
  local files=(/etc/apt/sources.list.d/*.sources)
  if ((${#files[@]})); then
    awk -v suite="$suite" '
      function flush() { if (is_deb && wanted && uri != "") { print uri; done = 1; exit }
                         is_deb = wanted = 0; uri = "" }
      FNR == 1 { flush() }
      /^#/ { next }
      /^[[:space:]]*$/ { flush(); next }
      tolower($1) == "types:" { for (i = 2; i <= NF; ++i) if ($i == "deb") is_deb = 1 }
      tolower($1) == "uris:" { uri = $2 }
      tolower($1) == "suites:" { for (i = 2; i <= NF; ++i) if ($i == suite) wanted = 1 }
      END { if (!done) flush() }' "${files[@]}"
  fi
  files=(/etc/apt/sources.list /etc/apt/sources.list.d/*.list)
  for file in "${files[@]}"; do
    [[ -f $file ]] || continue
    sed -E 's/^(deb[[:space:]]+)\[[^]]*\]/\1/' "$file" |
      awk -v suite="$suite" '$1 == "deb" && $3 == suite { print $2; exit }'
  done
}

# Proxies, certificates and pip's configuration are properties of the network, not of the machine's
# installed software, so the bare machine gets them; the suite's own files it does not have yet.
copy_network_settings() {
  local file
  for file in /etc/resolv.conf /etc/hosts /etc/pip.conf; do
    if [[ -e $file ]]; then cp -L "$file" "$tree$file"; fi
  done
  for file in /etc/apt/apt.conf /etc/apt/apt.conf.d/*; do
    if [[ -f $file ]] && grep -q '^Acquire' "$file"; then cp -L "$file" "$tree$file"; fi
  done
  # Installing ca-certificates inside makes the bundle from these and Debian's own.
  if [[ -d /usr/local/share/ca-certificates ]]; then
    mkdir -p "$tree/usr/local/share/ca-certificates"
    cp -rL /usr/local/share/ca-certificates/. "$tree/usr/local/share/ca-certificates/"
  fi
}

# Sets inside_environment: what the commands inside see, and nothing else.
choose_environment() {
  inside_environment=(HOME=/root LANG=C.UTF-8 "TERM=${TERM:-dumb}"
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin)
  local name
  for name in $(compgen -e); do
    case $name in
      # These name folders of this machine, from which the bare one must not live.
      PIP_FIND_LINKS | PIP_CACHE_DIR | PIP_TARGET | PIP_PREFIX) ;;
      PIP_* | SSL_CERT_FILE | REQUESTS_CA_BUNDLE | CURL_CA_BUNDLE | http_proxy | https_proxy | \
        no_proxy | HTTP_PROXY | HTTPS_PROXY | NO_PROXY | ALL_PROXY)
        inside_environment+=("$name=${!name}")
        ;;
    esac
  done
}

inside() { chroot "$tree" /usr/bin/env -i "${inside_environment[@]}" "$@"; }

# ---- the tree ------------------------------------------------------------------------------------

# Nothing of this machine's /dev is mounted inside, so that removing the tree can never reach it.
mount_kernel_folders() {
  if ! mount -t proc proc "$tree/proc" 2>/dev/null && ! mount --bind /proc "$tree/proc" 2>/dev/null; then
    say "mounting /proc is not allowed here; going on without it"
  fi
  if mount -t tmpfs -o mode=755 tmpfs "$tree/dev" 2>/dev/null; then
    local device
    for device in "null 1 3" "zero 1 5" "full 1 7" "random 1 8" "urandom 1 9" "tty 5 0"; do
      # shellcheck disable=SC2086 # name, major, minor
      set -- $device
      mknod -m 666 "$tree/dev/$1" c "$2" "$3"
    done
    ln -s /proc/self/fd "$tree/dev/fd"
    ln -s /proc/self/fd/0 "$tree/dev/stdin"
    ln -s /proc/self/fd/1 "$tree/dev/stdout"
    ln -s /proc/self/fd/2 "$tree/dev/stderr"
    mkdir -m 1777 "$tree/dev/shm"
  else
    say "mounting /dev is not allowed here; using the devices that debootstrap made"
  fi
}

is_mounted() { grep -qF " $1 " /proc/self/mounts; }

clean_up() {
  local status=$? folder
  for folder in "$tree/dev" "$tree/proc"; do
    if is_mounted "$folder"; then umount "$folder" 2>/dev/null || umount -l "$folder"; fi
  done
  if [[ $keep == yes ]]; then
    say "the tree is left in $tree"
  elif [[ -d $tree ]]; then
    rm -rf --one-file-system "$tree"
  fi
  exit "$status"
}

copy_checkout() {
  mkdir -p "$checkout"
  if [[ $worktree == yes ]]; then
    git -C "$root" ls-files -z --cached --others --exclude-standard |
      tar -C "$root" --null -T - -cf - | tar -C "$checkout" -xf -
  else
    git clone -q --no-hardlinks "$root" "$checkout"
  fi
}

# step NAME COMMAND...: runs it in the checkout inside; reports and remembers how it went.
step() {
  local name=$1 began=$SECONDS status=0
  shift
  say "inside: $*"
  # shellcheck disable=SC2016 # expanded inside
  inside /bin/sh -c 'cd "$1" && shift && exec "$@"' sh "${checkout#"$tree"}" "$@" || status=$?
  if ((status == 0)); then
    echo "PASS $name ($((SECONDS - began)) s)"
  else
    echo "FAIL $name (exit $status, $((SECONDS - began)) s)"
    failed=yes
  fi
}

mirror=$(find_mirror | head -n 1)
[[ -n $mirror ]] || die 3 "no source of Debian's $suite in /etc/apt/sources.list or" \
  "/etc/apt/sources.list.d; this test needs a machine whose apt knows one"
if [[ -n $tree ]]; then
  [[ ! -e $tree ]] || die 2 "--tree: $tree exists; give a folder that does not"
  mkdir -p "$tree"
else
  tree=$(mktemp -d "${TMPDIR:-/tmp}/bare_debian.XXXXXX")
fi
tree=$(cd "$tree" && pwd -P)
chmod 755 "$tree"
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

say "making a minimal $suite in $tree"
debootstrap --variant=minbase "$suite" "$tree" "$mirror" >"$tree.log" 2>&1 || {
  tail -n 20 "$tree.log" >&2
  die 3 "debootstrap failed; its output is in $tree.log"
}
rm -f "$tree.log"

checkout=$tree/root/shardproof
failed=no
copy_network_settings
choose_environment
mount_kernel_folders
copy_checkout
step "verify attention --quick" ./shardproof verify attention --quick
if [[ $verify_only == no ]]; then
  step "test" ./shardproof test
fi
if [[ $failed == yes ]]; then
  echo "FAIL: a bare Debian 12 cannot run this checkout"
  exit 1
fi
echo "PASS: a bare Debian 12 runs this checkout"
