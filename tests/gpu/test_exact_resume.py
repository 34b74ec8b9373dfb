"""Deterministic mode on a card: a run that was killed goes on to the same bits."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from nsa_core.rundir.layout import RunDir
from tests.core.train.models import same
from tests.integration.trainer_runs import (
    events,
    exit_of,
    losses,
    make_run,
    next_attempt,
    stderr,
    steps_logged,
    wait_for,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

STEPS, SAVED = 60, 20
MODEL = {
    "dim": 128, "num_layers": 2, "num_heads": 4, "num_kv_groups": 2, "head_dim_k": 64,
    "head_dim_v": 64, "mlp_width": 256,
    "nsa": {"compress_block": 32, "compress_stride": 16, "select_block": 64, "num_selected": 4,
            "window": 128},
}  # fmt: skip
#: Documents of any length in short rows, whose selected branch is masked dense; and rows that are
#: one document, beyond the length from which it is cut into items.
ROWS = {
    "short": {"batch": {"seq_len": 512}, "data": {"pack_documents": True}},
    "long": {"batch": {"seq_len": 4096}, "data": {"pack_documents": False}},
}


def new_run(root: Path, name: str, rows: str) -> RunDir:
    return make_run(
        root, root, name, model=MODEL, batch={"micro_batch": 1, **ROWS[rows]["batch"]},
        data=ROWS[rows]["data"], schedule={"steps": STEPS},
        checkpoint={"save_every": SAVED}, evaluation={"eval_every": 30},
        runtime={"device": "cuda", "precision": "bf16", "deterministic": True},
    )  # fmt: skip


def start(run: RunDir) -> subprocess.Popen[bytes]:
    with (run.root.parent / f"{run.run_id}.stderr").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "nsa_core.train", "--run-dir", str(run.root)],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=dict(os.environ),
        )  # fmt: skip


def finish(run: RunDir) -> None:
    assert start(run).wait(timeout=240) == 0, stderr(run)
    assert exit_of(run).code == 0


@pytest.mark.parametrize("rows", list(ROWS))
def test_sixty_steps_are_those_of_twenty_a_kill_and_forty(tmp_path: Path, rows: str) -> None:
    straight = new_run(tmp_path, "straight", rows)
    finish(straight)
    cut = new_run(tmp_path, "cut", rows)
    child = start(cut)
    wait_for(lambda: steps_logged(cut) > SAVED + 2, timeout_s=120)
    child.send_signal(signal.SIGKILL)
    assert child.wait(timeout=30) == -signal.SIGKILL
    assert not cut.final_model.exists(), "the run ended before it was killed"
    next_attempt(cut)
    finish(cut)
    assert events(cut, "resumed")
    assert len(losses(straight)) == STEPS
    assert losses(cut) == losses(straight)
    assert same(load_file(cut.final_model), load_file(straight.final_model))
