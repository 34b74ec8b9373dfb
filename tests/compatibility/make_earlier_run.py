"""Make `earlier_run.tar.xz`: a run, its registry and its backup, as commit efad81d wrote them.

From a checkout of that commit, with this file copied into it and nothing at /srv/nsa:

    .venv/bin/python -m tests.compatibility.make_earlier_run TARGET.tar.xz

It trains a model of a few thousand weights with the real commands: launch, halt, resume, halt,
backup pull. Then a copy of the run trains two more steps; their losses go into the archive too.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

#: Paths in the archive begin with this folder, and name no real machine.
ROOT = Path("/srv/nsa")
#: A link to the checkout, so that the manifest's command names no other folder either.
CHECKOUT = ROOT / "checkout"
RUN_ID = "20261128-0900-tiny-cpu-e5f6"
SETS = (
    "model.dim=8", "model.num_layers=1", "model.num_heads=2", "model.num_kv_groups=1",
    "model.head_dim_k=4", "model.head_dim_v=4", "model.mlp_width=16", "model.vocab_size=257",
    "model.nsa.compress_block=4", "model.nsa.compress_stride=2", "model.nsa.select_block=4",
    "model.nsa.num_selected=3", "model.nsa.window=8",
    "data.source=synthetic", "data.max_tokens=20000", "batch.seq_len=64", "batch.micro_batch=8",
    "batch.accumulation=8", "schedule.steps=5000", "schedule.warmup_steps=4",
    "checkpoint.save_every=1000", "telemetry.log_every=1", "telemetry.gate_every=5",
    "telemetry.tensorboard=false", "evaluation.eval_every=1000", "evaluation.sample_tokens=4",
    "runtime.threads=1",
)  # fmt: skip
OVERRIDES = ("preflight", "dimensions", "recipe", "data")
#: Steps that each attempt trains before it is halted.
HALT_AFTER = 6


def main(target: Path) -> None:
    """Train, halt, resume, halt, back up, and pack everything."""
    ROOT.mkdir()
    CHECKOUT.symlink_to(Path.cwd())
    _write_python()
    _command("pod", "add", "here", f"local:{ROOT / 'pod'}", "--profile", "cpu", "--python",
             str(ROOT / "python"), "-y")  # fmt: skip
    flags = [word for one in SETS for word in ("--set", one)]
    flags += [word for one in OVERRIDES for word in ("--override", f"{one}=it is a test")]
    flags += ["--profile", "cpu", "--recipe", "tiny-cpu", "-y"]
    _command("launch", "--run-id", RUN_ID, *flags)
    first = _halt(HALT_AFTER)
    _command("resume", RUN_ID, "-y")
    second = _halt(first + HALT_AFTER)
    _command("backup", "pull", RUN_ID, "--checkpoint", "all", "-y")
    _command("backup", "verify", RUN_ID, "--load")
    expected = {"steps": [first, second], "losses": _continue(second)}
    (ROOT / "expected.json").write_text(json.dumps(expected, indent=2) + "\n")
    _pack(target)


def _write_python() -> None:
    python = ROOT / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)


def _command(*words: str) -> dict[str, Any]:
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(ROOT), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(CHECKOUT), "NSA_OPS_STATE_DIR": str(ROOT / "state"),
        "NSA_OPS_TMUX_SOCKET": "nsa-earlier-run",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "nsa_ops", *words, "--json", "--no-input"],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=False,
    )  # fmt: skip
    answer: dict[str, Any] = json.loads(done.stdout)
    if not answer["ok"]:
        message = f"{words}: {answer['errors']}"
        raise RuntimeError(message)
    return answer


def _halt(step: int) -> int:
    """Halt the run once it has done a step; returns the step of the checkpoint that it leaves."""
    table = ROOT / "pod" / "runs" / RUN_ID / "training.csv"
    while not table.exists() or table.read_bytes().count(b"\n") <= step:
        time.sleep(0.05)
    halted = _command("halt", RUN_ID, "--reason", "enough steps", "-y")["data"]
    return int(halted["checkpoint"]["step"])


def _continue(step: int) -> list[float]:
    """Losses of the next two steps, trained on a copy of the pod's folder."""
    from nsa_core.rundir.layout import RunDir
    from tests.compatibility.continuation import train_two_steps

    shutil.copytree(ROOT / "pod", ROOT / "copy", symlinks=True)
    return train_two_steps(RunDir(ROOT / "copy" / "runs" / RUN_ID), step)


def _pack(target: Path) -> None:
    """The run, the staged tokens, the state folder and the expected losses; no code, no caches."""
    kept = ("pod/runs", "pod/data", "state", "expected.json")
    with tarfile.open(target, "w:xz", preset=9) as archive:
        for name in kept:
            archive.add(ROOT / name, name, filter=_neutral)


def _neutral(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
