"""Write heartbeats: a thread proves that the process lives, the loop proves that it moves."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from nsa_core.rundir.atomic import append_line
from nsa_core.rundir.heartbeat import Heartbeat, Message, Phase
from nsa_core.rundir.jsonl import read_last_records
from nsa_core.rundir.layout import RunDir
from nsa_core.train.disk import LossyWrites


class HeartbeatWriter:
    """heartbeat_rank{r}.jsonl of one attempt; safe to use from the loop and the thread.

    Attributes:
        sample: Called by the thread after each beat; may be slow.
        phase: What the loop is doing.
        phase_deadline_s: How long that may take.
        step: Optimizer steps done.
        micro_step: Micro-steps done in the current step.
        staging: What the data phase is doing, in fields of a beat; written in it only.
    """

    def __init__(
        self, run: RunDir, *, run_id: str, attempt: int, rank: int, writes: LossyWrites
    ) -> None:
        self._path = run.heartbeat(rank)
        self._identity = {"run_id": run_id, "attempt": attempt, "rank": rank, "pid": os.getpid()}
        self.writes = writes
        self._lock = threading.Lock()
        self._finished = threading.Event()
        self._alive_seq = 0
        self._progress_seq = 0
        self.sample: Callable[[], None] | None = None
        self.phase: Phase = "init"
        self.phase_deadline_s: float | None = None
        self.step = 0
        self.micro_step = 0
        self.staging: dict[str, Any] = {}

    def start(self, interval_s: float) -> None:
        """Begin the thread that moves `alive_seq` and writes a beat every interval."""
        self.write("boot")
        threading.Thread(
            target=self._beat, args=(interval_s,), name="heartbeat", daemon=True
        ).start()

    def stop(self) -> None:
        """End the thread; the loop may still write."""
        self._finished.set()

    def advance(self, *, step: int | None = None, micro_step: int = 0) -> None:
        """The loop moved; costs no write."""
        self._progress_seq += 1
        self.micro_step = micro_step
        if step is not None:
            self.step = step

    def enter(self, phase: Phase, deadline_s: float | None = None) -> None:
        """Change the phase; a phase that may last is written at once."""
        self.phase, self.phase_deadline_s = phase, deadline_s
        if phase not in ("train", "data_wait"):
            self.write("beat")

    @contextmanager
    def within(self, phase: Phase, deadline_s: float | None = None) -> Iterator[None]:
        """Be in `phase` during the body, then again in the phase before with its own deadline."""
        before = self.phase, self.phase_deadline_s
        self.enter(phase, deadline_s)
        try:
            yield
        finally:
            self.enter(*before)

    def write(self, msg: Message, **progress: Any) -> None:
        """Write one line; fields of `progress` are those of `Heartbeat`."""
        with self._lock:
            now = time.time()
            beat = Heartbeat(
                **self._identity,
                ts=now,
                iso=datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds"),
                msg=msg,
                phase=self.phase,
                phase_deadline_s=self.phase_deadline_s,
                alive_seq=self._alive_seq,
                progress_seq=self._progress_seq,
                step=self.step,
                micro_step=self.micro_step,
                **(self.staging if self.phase == "data" else {}),
                **progress,
            )
            line = beat.model_dump_json(exclude_none=True)
            self.writes.attempt("a heartbeat", lambda: append_line(self._path, line))

    def _beat(self, interval_s: float) -> None:
        while not self._finished.wait(interval_s):
            self._alive_seq += 1
            self.write("beat")
            if self.sample is not None:
                self.sample()


def count_torn_lines(run: RunDir, rank: int = 0) -> int:
    """Whether the last heartbeat line was cut by a kill; the next append starts a new line."""
    path = run.heartbeat(rank)
    try:
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return 0
            file.seek(-1, os.SEEK_END)
            return int(file.read(1) != b"\n")
    except OSError:  # none yet; one that cannot be read is said by `clear_obstacles`
        return 0


def read_last_alive(run: RunDir) -> float | None:
    """Time of the newest heartbeat of rank 0."""
    beats = read_last_records(run.heartbeat(), Heartbeat).records
    return beats[-1].ts if beats else None
