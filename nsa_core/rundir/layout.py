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


@dataclass(frozen=True)
class RunDir:
    """The paths in one run directory; the directory is the whole interface of a run."""

    root: Path

    @property
    def run_id(self) -> str:
        """The run id is the folder's name."""
        return self.root.name

    @property
    def pod_root(self) -> Path:
        """The folder that holds `runs/`; relative data folders lie below it."""
        parent = self.root.parent
        return parent.parent if parent.name == "runs" else parent

    @property
    def manifest(self) -> Path:
        """What was launched: the only thing the trainer reads."""
        return self.root / "manifest.json"

    @property
    def config(self) -> Path:
        """The resolved configuration alone."""
        return self.root / "config.yaml"

    @property
    def env(self) -> Path:
        """Versions, cards and the environment that matters."""
        return self.root / "env.json"

    def heartbeat(self, rank: int = 0) -> Path:
        """Heartbeat lines of one rank."""
        return self.root / f"heartbeat_rank{rank}.jsonl"

    @property
    def training_csv(self) -> Path:
        """One row per logged step."""
        return self.root / "training.csv"

    @property
    def validation_csv(self) -> Path:
        """One row per validation."""
        return self.root / "val.csv"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard event files."""
        return self.root / "tb"

    @property
    def metrics(self) -> Path:
        """Summary, rewritten at every checkpoint and at the end."""
        return self.root / "metrics.json"

    @property
    def goodput(self) -> Path:
        """Where every second of wall time went."""
        return self.root / "goodput.json"

    @property
    def data(self) -> Path:
        """What the tokens were made of and what was dropped, and the tokenizer; not the tokens."""
        return self.root / "data"

    @property
    def data_account(self) -> Path:
        """What was dropped of the data, and why; see data_account.py."""
        return self.data / "account.json"

    @property
    def checkpoints(self) -> Path:
        """Folder of whole checkpoints."""
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """Folder of the checkpoint after this many optimizer steps."""
        return self.checkpoints / f"step_{step:06d}"

    @property
    def latest(self) -> Path:
        """Text file that holds the name of the newest checkpoint."""
        return self.checkpoints / "latest"

    @property
    def known_good(self) -> Path:
        """Text file that holds the name of the last known good checkpoint."""
        return self.checkpoints / "known_good"

    @property
    def reserve(self) -> Path:
        """A few blocks held back, so that a full disk leaves room for exit.json."""
        return self.root / ".reserve"

    @property
    def final_model(self) -> Path:
        """Weights of the finished run."""
        return self.root / "model.safetensors"

    @property
    def events(self) -> Path:
        """Everything that happened to the run."""
        return self.root / "events.jsonl"

    @property
    def halt(self) -> Path:
        """Stop request; see halt.py."""
        return self.root / ".HALT"

    @property
    def anomaly(self) -> Path:
        """Rule id of the last anomaly, one line."""
        return self.root / ".anomaly_type"

    @property
    def gate_collapse(self) -> Path:
        """Evidence of a gate collapse."""
        return self.root / "gate_collapse_details.json"

    def stack_dump(self, rank: int = 0) -> Path:
        """Stacks of all threads, appended at every SIGUSR1."""
        return self.root / f"stackdump_rank{rank}.txt"

    @property
    def hang_report(self) -> Path:
        """What the processes did while nothing moved."""
        return self.root / "hang_report.json"

    @property
    def cards(self) -> Path:
        """What changed about the cards since the attempt began."""
        return self.root / "cards.json"

    @property
    def exit(self) -> Path:
        """Exit code and reason of the attempt that ended."""
        return self.root / "exit.json"

    @property
    def log(self) -> Path:
        """Complete output of the trainer, all attempts."""
        return self.root / "training.log"

    @property
    def process(self) -> Path:
        """Who runs the current attempt: pids with start times and the boot id; see process.py."""
        return self.root / "process.json"

    @property
    def runner_lock(self) -> Path:
        """Locked (flock) by the runner and its trainer for as long as either of them lives."""
        return self.root / "runner.lock"

    @property
    def watchdog_lock(self) -> Path:
        """Locked (flock) by the one watchdog of this run."""
        return self.root / "watchdog.lock"

    @property
    def watchdog(self) -> Path:
        """Who watches it, and the watchdog's last verdict."""
        return self.root / "watchdog.json"

    @property
    def watchdog_log(self) -> Path:
        """Output of the watchdog."""
        return self.root / "watchdog.log"

    @property
    def samples(self) -> Path:
        """Generated text at the end of the run."""
        return self.root / "samples.json"

    def attempt(self, attempt: int) -> Path:
        """Folder that keeps manifest.json and exit.json of an earlier attempt."""
        return self.root / "attempts" / str(attempt)

    def replayed(self, attempt: int, table: Path) -> Path:
        """Rows of a CSV that an attempt wrote and the next one did again."""
        return self.attempt(attempt) / f"replayed_{table.name}"
