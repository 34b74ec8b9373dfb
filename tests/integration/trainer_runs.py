"""Start the real trainer on tiny models, watch it, kill it, and begin its next attempt."""

import csv
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from pydoc_data import topics
from typing import Any

from nsa_core.config.run import RunConfig
from nsa_core.rundir.events import Event, read_events
from nsa_core.rundir.exit import ExitRecord, read_exit
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest, begin_next_attempt, read_manifest, write_manifest
from nsa_core.train.__main__ import main

TINY: dict[str, Any] = {
    "model": {
        "vocab_size": 257, "dim": 16, "num_layers": 1, "num_heads": 2, "num_kv_groups": 1,
        "head_dim_k": 8, "head_dim_v": 8, "mlp_width": 32,
        "nsa": {"compress_block": 4, "compress_stride": 2, "select_block": 4, "num_selected": 3,
                "window": 8},
    },
    "data": {"source": "fineweb_edu_local", "tokenizer": "byte", "validation_fraction": 0.1},
    "batch": {"seq_len": 32, "micro_batch": 2, "accumulation": 2},
    "schedule": {"steps": 24, "warmup_steps": 4},
    "checkpoint": {"save_every": 4},
    "telemetry": {"log_every": 1, "gate_every": 4, "beat_interval_s": 0.5, "tensorboard": False},
    "evaluation": {"eval_every": 12, "eval_batches": 1, "sample_tokens": 4},
    "runtime": {"device": "cpu", "precision": "fp32", "threads": 1},
}  # fmt: skip


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `changes`, section by section."""
    merged = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def write_text_once(path: Path) -> Path:
    """A small file of real text: the chapters of the language reference, 100 KB of them."""
    if not path.exists():
        chapters = list(topics.topics.values())
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in chapters)[:100_000])
        path.write_text(path.read_text().rpartition("\n")[0] + "\n")
    return path


def make_run(root: Path, cache: Path, run_id: str = "r1", **changes: Any) -> RunDir:
    """A run directory below `root/runs` with attempt 1 of a tiny run; `cache` keeps the shards."""
    data = {"cache_dir": str(cache), "path": str(write_text_once(cache / "text.jsonl"))}
    values = merge(merge(TINY, {"data": data}), changes)
    run = RunDir(root / "runs" / run_id)
    run.root.mkdir(parents=True)
    write_manifest(
        run,
        RunManifest(
            run_id=run_id,
            config=RunConfig.model_validate(values),
            config_sha256="0" * 64,
            created_unix_s=time.time(),
        ),
    )
    return run


class Child:
    """A trainer that is running."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process

    def wait(self, timeout_s: float = 60) -> int:
        """Its exit code; negative is the signal that ended it."""
        self._process.join(timeout_s)
        code = self._process.exitcode
        assert code is not None, f"still running after {timeout_s} s"
        return code

    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.is_alive()

    def send(self, number: int) -> None:
        """Send it a signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """kill -9, at once."""
        self.send(signal.SIGKILL)
        self.wait()


#: Forks trainers from a process that has loaded torch once: four seconds less for each of them.
#: The optimizers of torch load its compiler, used or not.
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["nsa_core.train.training_run", "torch._dynamo", "torch._inductor"])


def start(run: RunDir, before: Callable[[], None] | None = None) -> Child:
    """Start the trainer; its output goes to a file beside the run.

    Args:
        run: What to run.
        before: A function of a module, called in the new process first: plants a fault.
    """
    target = str(run.root.parent / f"{run.run_id}.stderr")
    process = _SERVER.Process(target=_train, args=(str(run.root), target, before))
    process.start()
    return Child(process)


def _train(run_dir: str, output: str, before: Callable[[], None] | None) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stderr = os.fdopen(2, "w")
    if before is not None:
        before()
    sys.exit(main(["--run-dir", run_dir]))


def start_from_shell(run: RunDir) -> int:
    """`python -m nsa_core.train`, as the runner starts it; returns the exit code."""
    return subprocess.run(
        [sys.executable, "-m", "nsa_core.train", "--run-dir", str(run.root)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=60,
        check=False,
    ).returncode


def finish(run: RunDir, timeout_s: float = 60) -> int:
    """Run the current attempt to its end; returns its exit code."""
    return start(run).wait(timeout_s)


def next_attempt(run: RunDir, **changes: Any) -> RunManifest:
    """What `resume` does to the directory."""
    wanted = read_manifest(run).model_copy(update=changes)
    return begin_next_attempt(run, at_unix_s=time.time(), wanted=wanted)


def wait_for(what: Callable[[], Any], timeout_s: float = 40, interval_s: float = 0.002) -> Any:
    """The first true answer; no trainer that ends early is waited for in vain by more than this."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        answer = what()
        if answer:
            return answer
        time.sleep(interval_s)
    message = f"did not happen within {timeout_s} s"
    raise AssertionError(message)


def rows(path: Path) -> list[dict[str, str]]:
    """Rows of a table."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def losses(run: RunDir) -> list[tuple[str, str, str]]:
    """What must be equal bit for bit: step, loss and gradient norm as logged."""
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows(run.training_csv)]


def steps_logged(run: RunDir) -> int:
    """Steps in training.csv so far."""
    try:
        return max(0, run.training_csv.read_bytes().count(b"\n") - 1)
    except FileNotFoundError:
        return 0


def events(run: RunDir, kind: str) -> list[Event]:
    """Events of one kind."""
    return [event for event in read_events(run) if event.kind == kind]


def exit_of(run: RunDir) -> ExitRecord:
    """The exit record, which every end has to write."""
    record = read_exit(run)
    assert record is not None, "exit.json is missing"
    return record


def stderr(run: RunDir) -> str:
    """What the trainer said."""
    return (run.root.parent / f"{run.run_id}.stderr").read_text()


def flip_bit(path: Path, position: int = -20) -> None:
    """Change one bit in the middle of a file's content."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(bytes(content))
