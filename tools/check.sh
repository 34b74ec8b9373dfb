#!/bin/sh
# The one check command: format, lint, types, layers, shell scripts, image. All run; any failure fails.
#
# usage: tools/check.sh     (after tools/setup.sh dev; `make check` does both)
set -eu
cd "$(dirname "$0")/.."
PATH=$PWD/.venv/bin:$PATH

failed=''

check() { # check NAME COMMAND ARGUMENT...
  name=$1
  shift
  if "$@"; then
    echo "$name: ok"
  else
    failed="$failed $name"
  fi
}

check format ruff format --check .
check lint ruff check .
check types mypy
check layers lint-imports --no-logo --no-cache
check shell shellcheck tools/*.sh docker/*.sh .ci/run
if command -v hadolint >/dev/null; then
  check image hadolint Dockerfile
else
  echo 'image: not checked, because hadolint has no build for this platform'
fi

if [ -n "$failed" ]; then
  echo "failed:$failed"
  exit 1
fi
