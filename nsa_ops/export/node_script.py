"""The shell script of a node: code, packages, manifest, training; the same on every engine."""

import shlex

from nsa_ops.export.exported import ExportedRun
from nsa_ops.remote.snapshot import RECEIVE

#: Module that begins the first or the next attempt on a node and trains.
NODE_JOB = "nsa_ops.pod.node_job"
_PACKAGES = "torch numpy pydantic safetensors yaml"

#: Needs `root`, `scratch` and `archive`; sets `code`, `python` and `manifest`.
_PREPARE = """\
# --- The same on every engine; there is nothing to edit from here on. ---
set -eu
trap 'exit 75' TERM INT # stopped before the training began: it may be started again
run_id={run_id}
code_id={code_id}
code=$scratch/code/$code_id
environment=$scratch/environments/{environment}
manifest=$scratch/$run_id.manifest.json
mkdir -p "$root" "$scratch"

fail() {{
  printf 'error: %s\\nhint: %s\\n' "$1" "$2" >&2
  exit 2
}}

# 1. An interpreter with the packages: of our image, of this machine, or made here once.
suits() {{
  "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null
}}
has_packages() {{
  suits "$1" && "$1" -c 'import importlib.util, sys
sys.exit(any(importlib.util.find_spec(name) is None for name in sys.argv[1:]))' \\
    {packages} 2>/dev/null
}}
python=
for candidate in /opt/nsa/venv/bin/python python3 python "$environment/bin/python"; do
  if has_packages "$candidate"; then
    python=$(command -v "$candidate")
    break
  fi
done
base=$python
for candidate in python3.12 python3.13 python3.11 python3.14 python3; do
  if [ -z "$base" ] && suits "$candidate"; then
    base=$(command -v "$candidate")
  fi
done
if [ -z "$base" ]; then
  PATH=${{HOME:-/root}}/.local/bin:$PATH
  command -v uv >/dev/null || python3 -m pip install --quiet --user uv ||
    fail 'this node has no Python 3.11 to 3.14 and no uv' 'use an image that has one'
  uv python install --quiet 3.12
  base=$(uv python find 3.12)
fi

# 2. The code, checked against its hash, whole or not there.
if [ ! -f "$code/CODE_ID" ]; then
  [ -f "$archive" ] || fail "the code is missing: $archive" 'put it there; nsa-ops export wrote it'
  cat >"$scratch/receive.$$.py" <<'NSA_RECEIVE'
{receive}
NSA_RECEIVE
  "$base" -I "$scratch/receive.$$.py" "$code" "$code_id" <"$archive" >&2
  rm -f "$scratch/receive.$$.py"
fi
if [ -z "$python" ]; then
  echo 'installing the locked packages; the first time takes minutes, torch is large' >&2
  mkdir -p "${{environment%/*}}"
  sh "$code/tools/setup.sh" pod "$environment" "$base" {torch_backend} {torch_requirement}
  python=$environment/bin/python
fi

# 3. The manifest: what is trained. A run that has begun keeps the one that it began with.
cat >"$manifest.$$" <<'NSA_MANIFEST'
{manifest}
NSA_MANIFEST
mv -f "$manifest.$$" "$manifest"
"""

#: Needs what `_PREPARE` sets, `node_rank`, `num_nodes`, `master_addr`, `master_port`, and where it
#: is not TERM `stop_signal`; no single quotes, because Slurm gets it as an argument.
TRAIN = """\
# 4. Train: attempt 1, or the next one from the newest whole checkpoint. `exec`, so that the stop
# signal of the engine reaches it.
mkdir -p "$root/node_$node_rank/runs"
TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$scratch/caches/triton/$code_id}
TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$scratch/caches/torchinductor/$code_id}
PYTHONPATH=$code PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 PYTHONUTF8=1
export TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR
export PYTHONPATH PYTHONSAFEPATH PYTHONUNBUFFERED PYTHONUTF8
exec "$python" -m {module} \\
  --run-dir "$root/node_$node_rank/runs/$run_id" --manifest "$manifest" \\
  --num-nodes "$num_nodes" --node-rank "$node_rank" \\
  --master-addr "$master_addr" --master-port "$master_port" --stop-signal "${stop_signal:-TERM}"
""".replace("{module}", NODE_JOB)


def prepare_script(run: ExportedRun) -> str:
    """Code, interpreter and manifest of a run on one node; a second time does nothing."""
    return _PREPARE.format(
        run_id=shlex.quote(run.run_id),
        code_id=shlex.quote(run.code_id),
        environment=shlex.quote(run.environment),
        packages=_PACKAGES,
        receive=RECEIVE.strip("\n"),
        torch_backend=shlex.quote(run.torch_backend),
        torch_requirement=shlex.quote(run.torch_requirement),
        manifest=run.manifest,
    )


def node_script(run: ExportedRun, head: str) -> str:
    """The whole script of a node; `head` sets its places and the engine's own rank variables."""
    return f"{head.rstrip()}\n\n{prepare_script(run)}\n{TRAIN}"
