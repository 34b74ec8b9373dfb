"""The trainer in this process, as an attempt opens it: no signals, no thread, no exit.json."""

import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from nsa_core.config.run import RunConfig
from nsa_core.model.stored_tensors import find_stored, read_stored
from nsa_core.rundir.checkpoint import MODEL_FILE, OPTIMIZER_FILE, read_checkpoint
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest, read_manifest, write_manifest
from nsa_core.train.failure import AttemptEnd
from nsa_core.train.group import RankGroup
from nsa_core.train.session import TrainingSession, prepare
from nsa_core.train.stop import SignalWatch, StopWatch
from nsa_core.train.telemetry import AttemptContext, Telemetry
from nsa_core.train.timing import start_clock
from nsa_core.train.training_run import run_training
from tests.integration.trainer_runs import merge

#: Long enough documents for choices that are free (more than 4 blocks of 4), several in a row.
SMALL: dict[str, Any] = {
    "seed": 3,
    "model": {
        "vocab_size": 257, "dim": 16, "num_layers": 2, "num_heads": 2, "num_kv_groups": 1,
        "head_dim_k": 8, "head_dim_v": 8, "mlp_width": 32,
        "nsa": {"compress_block": 4, "compress_stride": 2, "select_block": 4, "num_selected": 4,
                "window": 6},
    },
    "data": {"source": "fineweb_edu_local", "tokenizer": "byte", "validation_fraction": 0.1},
    "batch": {"seq_len": 48, "micro_batch": 2, "accumulation": 2},
    "schedule": {"steps": 5, "warmup_steps": 2, "min_ratio": 0.2},
    "optimizer": {"learning_rate": 0.02, "beta1": 0.8, "beta2": 0.97, "eps": 1e-3,
                  "weight_decay": 0.5, "clip_norm": 0.5},
    "checkpoint": {"save_every": 1, "keep_last": 100, "background": False},
    "telemetry": {"log_every": 1, "gate_every": 100, "tensorboard": False},
    "evaluation": {"eval_every": 0, "eval_batches": 1, "sample_tokens": 0},
    "runtime": {"device": "cpu", "precision": "fp32", "threads": 1},
}  # fmt: skip


def write_texts(path: Path) -> list[str]:
    """120 documents of 1 to 60 letters, the same ones each time."""
    numbers = random.Random(11)
    texts = [
        f"{number:x}" + "".join(numbers.choices("abcdefgh ", k=numbers.randrange(60)))
        for number in range(120)
    ]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def new_run(root: Path, text: Path, run_id: str = "r1", **changes: Any) -> RunDir:
    """A run directory below `root/runs` with attempt 1 of a small run on a file of text."""
    data = {"path": str(text), "cache_dir": str(text.parent / "shards")}
    config = RunConfig.model_validate(merge(merge(SMALL, {"data": data}), changes))
    run = RunDir(root / "runs" / run_id)
    run.root.mkdir(parents=True)
    write_manifest(
        run,
        RunManifest(
            run_id=run_id, config=config, config_sha256="0" * 64, created_unix_s=time.time()
        ),
    )
    return run


@contextmanager
def attempt(run: RunDir) -> Iterator[AttemptContext]:
    """An attempt that can report and has not begun."""
    manifest = read_manifest(run)
    telemetry = Telemetry(run, manifest)
    signals = SignalWatch(lambda why: None)
    try:
        yield AttemptContext(run, manifest, RankGroup(), telemetry, signals)
    finally:
        telemetry.close()


def run_here(run: RunDir) -> AttemptEnd:
    """One attempt from the first line to the last."""
    with attempt(run) as context:
        return run_training(context, None)


@contextmanager
def opened(run: RunDir) -> Iterator[TrainingSession]:
    """The session of an attempt, ready to train."""
    with attempt(run) as context:
        clock = start_clock(run, attempt=context.manifest.attempt, last_alive_unix_s=None)
        stop = StopWatch(run, context.manifest, context.signals, report_stale=lambda what: None)
        session = prepare(context, stop, clock)
        try:
            yield session
        finally:
            session.loader.close()


def saved(run: RunDir, step: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and optimizer state in the checkpoint of a step, of whatever number of ranks."""
    found = read_checkpoint(run.checkpoint(step))
    assert found is not None
    weights, state = (
        read_stored(find_stored(found.path, found.manifest, name))
        for name in (MODEL_FILE, OPTIMIZER_FILE)
    )
    return weights, state
