#!/bin/sh
# Write requirements/{core,train,dev}.lock, and the lock of the parsers of engines (tools/engines.sh):
# versions and hashes for every platform, no index address.
#
# usage: tools/lock.sh [uv pip compile option...]     for example: tools/lock.sh --upgrade
#
# torch and the CUDA libraries that only its CUDA build needs stay out (see requirements/torch.txt);
# what both builds need is in. train.lock and core.lock hold the same versions as dev.lock.
# shellcheck disable=SC2016  # the backticks are shown to a person, they run nothing
set -eu
cd "$(dirname "$0")/.."

uv=$(command -v uv || command -v .venv/bin/uv) || {
  echo 'error: `uv` is needed to write the locks' >&2
  echo 'hint: run `make test` once, which puts it into .venv' >&2
  exit 11
}

compile() { # compile OUTPUT OPTION...
  output=$1
  shift
  "$uv" pip compile pyproject.toml --quiet --universal --python-version 3.11 --no-annotate \
    --constraint requirements/torch.txt --custom-compile-command tools/lock.sh \
    --output-file "$output" "$@"
}

everything=$(mktemp)
trap 'rm -f "$everything"' EXIT
compile "$everything" --extra train --extra fabric --group setup --group dev "$@"
left_out=$(sed -nE 's/^((torch|nvidia-[a-z0-9-]+|cuda-[a-z]+)==).*/\1/p' "$everything" | tr -d '=')

set -- --generate-hashes "$@"
for name in $left_out; do
  set -- "$@" --no-emit-package "$name"
done
compile requirements/dev.lock --extra train --extra fabric --group setup --group dev "$@"
compile requirements/train.lock --constraint requirements/dev.lock --extra train --group setup "$@"
compile requirements/core.lock --constraint requirements/dev.lock "$@"

# What reading a file of an engine does not load: its servers, clouds, solvers and terminals. pycasbin
# writes the very files of casbin, and which of them wins would be another one at every install.
for name in aiofiles argcomplete asyncpg bracex cpsat-logutils cursor gitdb gitpython httptools \
  ignore-python networkx orloge pandas pendulum pip prompt-toolkit pulp pycasbin pycparser pyjwt \
  python-dateutil questionary requests-unixsocket rich-argparse setproctitle smmap types-paramiko \
  tzdata uvicorn uvloop watchfiles wcmatch websocket-client websockets wheel; do
  set -- "$@" --no-emit-package "$name"
done
"$uv" pip compile tests/ops/export/engines.in --quiet --universal --python-version 3.11 \
  --no-annotate --custom-compile-command tools/lock.sh --output-file tests/ops/export/engines.lock "$@"
