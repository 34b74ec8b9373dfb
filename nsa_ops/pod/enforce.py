"""Stop a run that the rules gave up: `.HALT`, then TERM, then KILL, each step recorded."""

import json
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from nsa_core.config.base import TolerantModel
from nsa_core.config.training import WatchdogLimits
from nsa_core.rundir import events
from nsa_core.rundir.atomic import write_text
from nsa_core.rundir.bounded_json import read_last_records
from nsa_core.rundir.exit import HANG_RULES, read_exit
from nsa_core.rundir.halt import HaltRequest, write_halt
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest
from nsa_core.rundir.process import ProcessIdentity, is_alive
from nsa_ops.pod.processes import kill_session, send
from nsa_ops.pod.rules.verdict import Finding, Verdict

_DUMP_WAIT_S = 2.0
_DUMP_POLL_S = 0.05
_MOST_CHARACTERS = 200_000
#: Addresses and thread numbers differ between ranks that are at the same place.
_NOISE = re.compile(r"0x[0-9a-f]+")
StopOutcome = Literal["ended", "terminated", "killed", "unkillable"]
_POLL_S = 0.1
_KILL_WAIT_S = 10.0


class StackGroup(TolerantModel):
    """Ranks whose newest stacks read the same."""

    ranks: list[int]
    text: str


class HangReport(TolerantModel):
    """Content of hang_report.json.

    Attributes:
        still: The second dump reads like the first: nothing moved in between.
        groups: Newest stacks of all ranks, the smallest group first: it names the odd rank.
        note: Why there are no stacks; empty if there are.
    """

    schema_version: int = 1
    at: float
    attempt: int
    rule: str
    sentence: str
    still: bool = False
    groups: list[StackGroup] = []
    note: str = ""


def parse_rank(path: Path) -> int:
    """The rank in `stackdump_rank3.txt`."""
    digits = re.search(r"(\d+)$", path.stem)
    return int(digits[1]) if digits else 0


def group_stacks(stacks: dict[int, str]) -> list[StackGroup]:
    """Ranks with the same text together, the smallest group first."""
    groups: dict[str, list[int]] = {}
    for rank, text in sorted(stacks.items()):
        groups.setdefault(_NOISE.sub("0x…", text), []).append(rank)
    return [
        StackGroup(ranks=ranks, text=text)
        for text, ranks in sorted(groups.items(), key=lambda item: len(item[1]))
    ]


def _sizes(run: RunDir) -> dict[Path, int]:
    return {path: path.stat().st_size for path in run.root.glob("stackdump_rank*.txt")}


def _dump(run: RunDir, trainer: ProcessIdentity) -> dict[int, str]:
    """Ask for stacks and read what was appended; empty if nothing came within 2 s."""
    before = _sizes(run)
    if not send(trainer, signal.SIGUSR1):
        return {}
    end = time.monotonic() + _DUMP_WAIT_S
    while time.monotonic() < end and _sizes(run) == before:
        time.sleep(_DUMP_POLL_S)
    time.sleep(_DUMP_POLL_S)  # let the writer finish its last lines
    stacks = {}
    for path in _sizes(run):
        with path.open("rb") as file:
            file.seek(before.get(path, 0))
            text = file.read(_MOST_CHARACTERS).decode(errors="replace")
        if text:
            stacks[parse_rank(path)] = text
    return stacks


def report_hang(
    run: RunDir, trainer: ProcessIdentity, *, attempt: int, rule: str, sentence: str
) -> HangReport:
    """Dump the stacks twice and write hang_report.json."""
    first = _dump(run, trainer)
    second = _dump(run, trainer)
    newest = second or first
    report = HangReport(
        at=time.time(),
        attempt=attempt,
        rule=rule,
        sentence=sentence,
        still=bool(first) and group_stacks(first) == group_stacks(second),
        groups=group_stacks(newest),
        note="" if newest else "no stacks came within 2 s of SIGUSR1: the process may be stopped",
    )
    write_text(run.hang_report, report.model_dump_json(indent=2) + "\n")
    return report


class Enforcer:
    """Stops one attempt of a run; the processes are those that process.json records."""

    def __init__(
        self,
        run: RunDir,
        manifest: RunManifest,
        trainer: ProcessIdentity,
        keep_alive: Callable[[], None],
    ) -> None:
        """Nothing is done yet.

        `keep_alive`: called while waiting, so that the watchdog shows that it lives.
        """
        self._run = run
        self._manifest = manifest
        self._trainer = trainer
        self._keep_alive = keep_alive
        self._limits: WatchdogLimits = manifest.config.watchdog

    def stop(self, verdict: Verdict) -> StopOutcome:
        """Go down the ladder until the trainer has ended."""
        write_anomaly(self._run, verdict, self._manifest.attempt)
        if verdict.rule in HANG_RULES:
            report_hang(
                self._run, self._trainer, attempt=self._manifest.attempt, rule=verdict.rule,
                sentence=verdict.sentence,
            )  # fmt: skip
        if self._ask(verdict) and self._wait_for_answer():
            return "ended"
        return self.end(f"no answer to .HALT ({verdict.rule})")

    def _record(self, kind: str, message: str, **facts: object) -> None:
        events.record(
            self._run, kind=kind, by="watchdog", attempt=self._manifest.attempt, message=message,
            facts=dict(facts),
        )  # fmt: skip

    def _ask(self, verdict: Verdict) -> bool:
        """Write `.HALT`; False if the disk does not take it, and then only signals are left."""
        reason = f"{verdict.rule}: {verdict.sentence}"
        try:
            self._record("halt_asked", reason, rule=verdict.rule)
            write_halt(
                self._run,
                HaltRequest(
                    run_id=self._manifest.run_id,
                    attempt=self._manifest.attempt,
                    reason=reason,
                    by="watchdog",
                    at=time.time(),
                    grace_s=self._limits.ack_grace_s,
                    rule=verdict.rule,
                ),
            )
        except OSError:
            return False
        return True

    def _has_ended(self) -> bool:
        ended = read_exit(self._run, self._manifest.attempt)
        return ended is not None or not is_alive(self._trainer)

    def _is_acknowledged(self) -> bool:
        beats = read_last_records(self._run.heartbeat(), Heartbeat).records
        return any(
            beat.msg == "halt_ack" and beat.attempt == self._manifest.attempt for beat in beats
        )

    def _wait_for_answer(self) -> bool:
        """Wait for the end; after an acknowledgement there is time to save a checkpoint."""
        if self._wait(
            lambda: self._has_ended() or self._is_acknowledged(), self._limits.ack_grace_s
        ):
            saving_s = max(self._limits.ack_grace_s, self._limits.phase_limit_s)
            return self._wait(lambda: not is_alive(self._trainer), saving_s)
        return False

    def _wait(self, done: Callable[[], bool], timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() >= end:
                return False
            self._keep_alive()
            time.sleep(_POLL_S)
        return True

    def end(self, why: str) -> StopOutcome:
        """TERM, and after its time KILL for the whole session."""
        pid = self._trainer.pid
        with suppress(OSError):  # a full disk must not stop the signals
            self._record(
                "signal", f"TERM to pid {pid}: {why}",
                signal="TERM", pid=pid,
            )  # fmt: skip
        send(self._trainer, signal.SIGTERM)
        if self._wait(lambda: not is_alive(self._trainer), self._limits.term_grace_s):
            return "terminated"
        with suppress(OSError):  # as above
            self._record(
                "signal", f"KILL to the session of pid {pid}: TERM had no effect",
                signal="KILL", pid=pid,
            )  # fmt: skip
        kill_session(self._trainer)
        if self._wait(lambda: not is_alive(self._trainer), _KILL_WAIT_S):
            return "killed"
        self._record(
            "unkillable", f"pid {pid} did not end after KILL: it hangs in the kernel, and only a "
            "restart of the pod frees the card", pid=pid,
        )  # fmt: skip
        return "unkillable"


def write_anomaly(run: RunDir, verdict: Verdict, attempt: int) -> None:
    """Leave `.anomaly_type`, and the figures of a gate collapse, for people and runbooks."""
    with suppress(OSError):  # a full disk must not keep a run from being stopped
        write_text(run.anomaly, verdict.rule + "\n")
        gates = next((f for f in verdict.findings if f.rule == "gates_collapsed"), None)
        if gates is not None:
            write_text(run.gate_collapse, _gate_details(gates, attempt))


def _gate_details(finding: Finding, attempt: int) -> str:
    details = {
        "schema_version": 1, "attempt": attempt, "level": finding.level,
        "sentence": finding.sentence, **finding.facts,
    }  # fmt: skip
    return json.dumps(details, indent=2) + "\n"
