"""RunDir: every path of a run directory, spelled here and nowhere else."""

import re
import secrets
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
CHECKPOINT_NAME = re.compile(r"step_([0-9]{6,18})")


def new_run_id(recipe: str, at: datetime) -> str:
    """A run id that sorts by time, can be read, and is unique: `20261127-1403-tiny-cpu-a1b2`."""
    readable = re.sub(r"[^A-Za-z0-9-]+", "-", recipe).strip("-") or "run"
    return f"{at:%Y%m%d-%H%M}-{readable}-{secrets.token_hex(2)}"


def check_run_id(run_id: str) -> str:
    """The run id itself.

    Raises:
        ValueError: If it cannot be the name of a folder and of a tmux session.
    """
    if not RUN_ID.fullmatch(run_id):
        message = (
            f"run id {run_id!r} must be 1 to 80 letters, digits, dots, dashes or underscores, "
            "beginning with a letter or digit"
        )
        raise ValueError(message)
    return run_id


class _Inside:
    """A path in a run directory, by its name below `root`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: "RunDir", _: type) -> Path:
        return run.root / self._name


@dataclass(frozen=True)
class RunDir:
    """The paths in one run directory; the directory is the whole interface of a run."""

    root: Path

    #: What was launched: the only thing the trainer reads.
    manifest = _Inside("manifest.json")
    #: The resolved configuration alone.
    config = _Inside("config.yaml")
    #: Versions, cards and the environment that matters.
    env = _Inside("env.json")
    #: One row per logged step.
    training_csv = _Inside("training.csv")
    #: One row per validation.
    validation_csv = _Inside("val.csv")
    #: TensorBoard event files.
    tensorboard = _Inside("tb")
    #: Summary, rewritten at every checkpoint and at the end.
    metrics = _Inside("metrics.json")
    #: Where every second of wall time went.
    goodput = _Inside("goodput.json")
    #: What the tokens were made of and what was dropped, and the tokenizer; not the tokens.
    data = _Inside("data")
    #: What was dropped of the data, and why; see data_account.py.
    data_account = _Inside("data/account.json")
    #: Folder of whole checkpoints.
    checkpoints = _Inside("checkpoints")
    #: Text file that holds the name of the newest checkpoint.
    latest = _Inside("checkpoints/latest")
    #: Text file that holds the name of the last known good checkpoint.
    known_good = _Inside("checkpoints/known_good")
    #: A few reserved blocks, so that a full disk leaves room for exit.json.
    reserve = _Inside(".reserve")
    #: Weights of the finished run.
    final_model = _Inside("model.safetensors")
    #: Everything that happened to the run.
    events = _Inside("events.jsonl")
    #: Stop request; see halt.py.
    halt = _Inside(".HALT")
    #: Rule id of the last anomaly, one line.
    anomaly = _Inside(".anomaly_type")
    #: Evidence of a gate collapse.
    gate_collapse = _Inside("gate_collapse_details.json")
    #: What the processes did while there was no progress.
    hang_report = _Inside("hang_report.json")
    #: What changed about the cards since the attempt began.
    cards = _Inside("cards.json")
    #: Exit code and reason of the attempt that ended.
    exit = _Inside("exit.json")
    #: Complete output of the trainer, all attempts.
    log = _Inside("training.log")
    #: Processes of the current attempt: pids with start times and the boot id; see process.py.
    process = _Inside("process.json")
    #: Locked (flock) by the runner and its trainer for as long as either of them lives.
    runner_lock = _Inside("runner.lock")
    #: Locked (flock) by the one watchdog of this run.
    watchdog_lock = _Inside("watchdog.lock")
    #: Who watches the run, and the watchdog's last verdict.
    watchdog = _Inside("watchdog.json")
    #: Output of the watchdog.
    watchdog_log = _Inside("watchdog.log")
    #: Folder of torchrun, where a run has several ranks; empty, and gone when the attempt ends.
    torchrun = _Inside("torchrun")
    #: Generated text at the end of the run.
    samples = _Inside("samples.json")

    @property
    def run_id(self) -> str:
        """The folder's name."""
        return self.root.name

    @property
    def pod_root(self) -> Path:
        """The folder that holds `runs/`; relative data folders lie below it."""
        parent = self.root.parent
        return parent.parent if parent.name == "runs" else parent

    def heartbeat(self, rank: int = 0) -> Path:
        """Heartbeat lines of one rank."""
        return self.root / f"heartbeat_rank{rank}.jsonl"

    def rank_process(self, rank: int) -> Path:
        """Process of one rank, where a run has several; see ranks.py."""
        return self.root / f"process_rank{rank}.json"

    def rank_exit(self, rank: int) -> Path:
        """How one rank ended, where a run has several; see ranks.py."""
        return self.root / f"exit_rank{rank}.json"

    def flight_record(self, rank: int | None = None) -> Path:
        """Last collectives of a rank that waited too long; without a rank, how all such begin."""
        return self.root / f"flight_recorder_rank{'' if rank is None else rank}"

    def checkpoint(self, step: int) -> Path:
        """Folder of the checkpoint after this many optimizer steps."""
        return self.checkpoints / f"step_{step:06d}"

    def stack_dump(self, rank: int = 0) -> Path:
        """Stacks of all threads, appended at every SIGUSR1."""
        return self.root / f"stackdump_rank{rank}.txt"

    def memory_report(self, attempt: int, rank: int = 0) -> Path:
        """What filled the memory of a rank that ran out of it; see memory_report.py."""
        return self.root / f"memory_attempt{attempt}_rank{rank}.json"

    def attempt(self, attempt: int) -> Path:
        """Folder that keeps manifest.json and exit.json of an earlier attempt."""
        return self.root / "attempts" / str(attempt)

    def replayed(self, attempt: int, table: Path) -> Path:
        """Rows of a CSV that an attempt wrote and the next one repeated."""
        return self.attempt(attempt) / f"replayed_{table.name}"
