#!/bin/sh
# Make a Python environment of this project, or say in one line what this machine lacks.
#
# usage: tools/setup.sh train|dev
#        tools/setup.sh pod ENVIRONMENT PYTHON BUILD REQUIREMENT
#   train  .venv with what `make demo` needs: the product, the trainer's packages, torch
#   dev    the same and the tools of `make check` and `make test`
#   pod    what `nsa-ops provision` has made on a pod: the same without the product, whose versions lie
#          beside each other there. ENVIRONMENT is named after everything it is made from, BUILD is a
#          CUDA build of torch or `cpu`, REQUIREMENT what the hardware profile says of torch
#
# Packages come from requirements/*.lock with their hashes. uv installs them: the one on PATH, or the
# one of the lock, which pip installs first. An environment that was made from the same locks is used
# again; one that is unfinished or broken is made anew. No package source is named here: each tool
# asks the one that this machine is configured for.
#
# Exit codes: 0 ready, 2 usage, 11 this machine lacks something.
# shellcheck disable=SC2016  # the backticks are shown to a person, they run nothing
set -eu
cd "$(dirname "$0")/.."

environment=.venv
lock=tools/setup.sh
requirement=''
product='nsa_core, nsa_ops'
oldest='3, 11' # what the code is written for
newest='3, 15' # the first version that the pinned torch has no wheel for

say() { printf '%s\n' "$*" >&2; }

fail() { # fail ERROR HINT
  say "error: $1"
  say "hint: $2"
  exit 11
}

suits() { "$1" -c "import sys; sys.exit(not ($oldest) <= sys.version_info < ($newest))" 2>/dev/null; }

find_python() { # print a suitable interpreter
  for candidate in python3 python3.14 python3.13 python3.12 python3.11 python; do
    if suits "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  [ -n "$uv" ] && "$uv" python find --no-python-downloads '>=3.11,<3.15' 2>/dev/null
}

has_gpu() { command -v nvidia-smi >/dev/null && timeout 20 nvidia-smi -L >/dev/null 2>&1; }

# What the environment was made from; an environment with another key is not used again.
key() { # key SET
  if [ "$set" = pod ]; then
    echo "${environment##*/}"
    return
  fi
  { pwd && "$python" -VV && echo "$build" && cat "requirements/$1.lock" requirements/torch.txt tools/setup.sh; } | cksum
}

works() {
  "$environment/bin/python" -P -c '
import importlib.util, pydantic, typer, yaml'"${product:+, $product}"'
raise SystemExit(importlib.util.find_spec("torch") is None)' >/dev/null 2>&1
}

is_made() { # is_made SET
  [ "$(cat "$environment/made-from-$1" 2>/dev/null)" = "$(key "$1")" ] && works
}

install() { # install ARGUMENT...: with uv where it is present
  if [ -n "$uv" ]; then
    "$uv" pip install --quiet --python "$environment/bin/python" "$@"
  else
    "$environment/bin/python" -m pip install --quiet --quiet --disable-pip-version-check "$@"
  fi
}

create() {
  rm -rf "$environment"
  if [ -n "$uv" ]; then
    "$uv" venv --quiet --no-project --python "$python" "$environment" && return
  elif "$python" -m venv "$environment" >/dev/null; then
    return
  fi
  rm -rf "$environment"
  fail "\`$python\` cannot make a virtual environment" \
    'install its venv module (Debian and Ubuntu: `apt-get install python3-venv`), or uv'
}

fetch_uv() { # fetch_uv SET: the uv of the lock, by pip
  [ -x "$environment/bin/uv" ] && return
  sed -n '/^uv==/,/[^\\]$/p' "requirements/$1.lock" >"$environment/uv.lock"
  install --require-hashes --requirement "$environment/uv.lock"
}

# pip takes minutes for what uv does in 20 seconds. It has the last word where uv is not on PATH: an
# index that only pip is configured for is then asked by pip.
install_lock() { # install_lock SET
  say "installing requirements/$1.lock into $environment"
  if [ -z "$uv" ]; then
    fetch_uv "$1" && "$environment/bin/uv" pip install --quiet --python "$environment/bin/python" \
      --require-hashes --requirement "requirements/$1.lock" && return
    say 'note: that failed with uv, for the reason above; pip tries now'
  fi
  install --require-hashes --requirement "requirements/$1.lock" ||
    fail 'the packages could not be installed; the reason is above' \
      'check the network, and that pip or uv knows your package index; then run the command again'
}

# torch is not in the locks: its CPU and CUDA builds share one version number and differ in hash.
# uv knows where each build lives, so the uv of the lock chooses. A wheel that this machine's pip is
# configured to find on its own disk comes first. The plain index comes last, said aloud, because on
# Linux its wheel is a CUDA build of the newest kind.
install_torch() {
  set -- --requirement requirements/torch.txt ${requirement:+"$requirement"}
  if [ "$build" = cpu ] && "$environment/bin/python" -m pip install --quiet --no-index --no-deps \
    "$@" 2>/dev/null; then
    say 'installed torch from a wheel on this machine'
    return
  fi
  say "installing torch, build $build"
  "$environment/bin/uv" pip install --quiet --python "$environment/bin/python" \
    --torch-backend "$build" "$@" && return
  case $build in cu12*)
    fail "torch for $build could not be installed; the reason is above" \
      'check the network: the builds of the package index are too new for the driver of this machine'
    ;;
  esac
  say 'note: that build is out of reach; taking the one of the package index (up to 3 GB on Linux)'
  install "$@" ||
    fail 'torch could not be installed; the reason is above' \
      'check the network and the free disk space; then run the command again'
}

make_environment() { # make_environment SET
  if ! is_made train; then
    create
  fi
  install_lock "$1"
  if ! works; then
    install_torch
    [ -z "$product" ] || install --no-deps --no-build-isolation --editable .
  fi
  works || fail "the environment in $environment does not work" 'run the command again; it is made anew'
  if [ "$1" = dev ]; then
    key train >"$environment/made-from-train"
  fi
  key "$1" >"$environment/made-from-$1"
}

# Two set-ups of one environment take turns. The lock is on this very file, or on one beside a pod's
# environment, through a descriptor that this shell keeps open: it ends with the shell, however that ends.
take_turn() {
  exec 9<"$lock"
  "$python" -c '
import fcntl, sys
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("waiting for another set-up of this environment", file=sys.stderr)
    fcntl.flock(9, fcntl.LOCK_EX)'
}

usage() {
  say 'usage: tools/setup.sh train|dev, or tools/setup.sh pod ENVIRONMENT PYTHON BUILD REQUIREMENT'
  exit 2
}

set=${1-}
uv=$(command -v uv || true)
case $set in
train | dev)
  python=$(find_python) || fail 'Python 3.11, 3.12, 3.13 or 3.14 is needed, and none is on PATH' \
    'install one (Debian and Ubuntu: `apt-get install python3 python3-venv`; anywhere: `uv python install 3.12`)'
  command -v tmux >/dev/null || fail '`tmux` is needed, because runs live in it, and it is not on PATH' \
    'install it (Debian and Ubuntu: `apt-get install tmux`; macOS: `brew install tmux`)'
  if has_gpu; then build=auto; else build=cpu; fi
  ;;
pod)
  [ $# -eq 5 ] || usage
  environment=$2 python=$3 build=$4 requirement=$5 product=''
  lock=$environment.lock
  : >>"$lock"
  set -- train
  ;;
*) usage ;;
esac
take_turn
is_made "$1" || make_environment "$1"
