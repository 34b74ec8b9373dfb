#!/bin/sh
# Install the parsers of the engines into .venv/engines, where the tests of `nsa-ops export` find them.
#
# usage: tools/engines.sh     (after tools/setup.sh dev)
#
# They are apart from .venv, because their dependencies exclude ours. Packages that reading a file does
# not load are left out of the lock, so nothing else is resolved here: 330 MB in about 10 s.
# shellcheck disable=SC2016  # the backticks are shown to a person, they run nothing
set -eu
cd "$(dirname "$0")/.."

lock=tests/ops/export/engines.lock
place=.venv/engines
uv=.venv/bin/uv
[ -x "$uv" ] || {
  echo 'error: there is no `.venv/bin/uv`' >&2
  echo 'hint: run `tools/setup.sh dev` first' >&2
  exit 11
}
made_from=$({ .venv/bin/python -VV && cat "$lock"; } | cksum)
[ "$(cat "$place/made-from" 2>/dev/null)" != "$made_from" ] || exit 0

echo "installing $lock into $place" >&2
rm -rf "$place"
"$uv" venv --quiet --no-project --python .venv/bin/python "$place"
"$uv" pip install --quiet --no-deps --require-hashes --python "$place/bin/python" --requirement "$lock"
echo "$made_from" >"$place/made-from"
