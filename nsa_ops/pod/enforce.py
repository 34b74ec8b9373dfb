"""Stop a run that the rules gave up: `.HALT`, then TERM, then KILL, each step recorded."""

import json
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

from nsa_core.config.training import WatchdogLimits
from nsa_core.rundir import events
from nsa_core.rundir.atomic import write_text
from nsa_core.rundir.bounded_json import read_last_records
from nsa_core.rundir.exit import HANG_RULES, read_exit
from nsa_core.rundir.halt import HaltRequest, write_halt
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest
from nsa_ops.pod.rules.verdict import Finding, Verdict
from nsa_ops.pod.stacks import report_hang
from nsa_ops.pod.trainer_group import TrainerGroup

StopOutcome = Literal["ended", "terminated", "killed", "unkillable"]
_POLL_S = 0.1
_KILL_WAIT_S = 10.0


class Enforcer:
    """Stops one attempt of a run; the processes are those that process.json records."""

    def __init__(
        self,
        run: RunDir,
        manifest: RunManifest,
        group: TrainerGroup,
        keep_alive: Callable[[], None],
    ) -> None:
        """Nothing is done yet.

        `keep_alive`: called while waiting, so that the watchdog shows that it lives.
        """
        self._run = run
        self._manifest = manifest
        self._group = group
        self._keep_alive = keep_alive
        self._heartbeats = run.heartbeat(manifest.pod_ranks.start)
        self._limits: WatchdogLimits = manifest.config.watchdog

    def stop(self, verdict: Verdict) -> StopOutcome:
        """Go down the ladder until the trainer has ended."""
        write_anomaly(self._run, verdict, self._manifest.attempt)
        odd = ""
        if verdict.rule in HANG_RULES:
            odd = report_hang(self._group, rule=verdict.rule, sentence=verdict.sentence).odd
        if self._ask(verdict, odd) and self._wait_for_answer():
            return "ended"
        return self.end(f"no answer to .HALT ({verdict.rule})")

    def _record(self, kind: str, message: str, **facts: object) -> None:
        events.record(
            self._run, kind=kind, by="watchdog", attempt=self._manifest.attempt, message=message,
            facts=dict(facts),
        )  # fmt: skip

    def _ask(self, verdict: Verdict, odd: str = "") -> bool:
        """Write `.HALT`; False if the disk does not take it, and then only signals are left.

        `odd`: which rank differs from the others, as their stacks show.
        """
        reason = "; ".join(filter(None, (f"{verdict.rule}: {verdict.sentence}", odd)))
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
        return ended is not None or not self._group.is_alive()

    def _is_acknowledged(self) -> bool:
        beats = read_last_records(self._heartbeats, Heartbeat).records
        return any(
            beat.msg == "halt_ack" and beat.attempt == self._manifest.attempt for beat in beats
        )

    def _wait_for_answer(self) -> bool:
        """Wait for the end; after an acknowledgement there is time to save a checkpoint."""
        if self._wait(
            lambda: self._has_ended() or self._is_acknowledged(), self._limits.ack_grace_s
        ):
            saving_s = max(self._limits.ack_grace_s, self._limits.phase_limit_s)
            return self._wait(lambda: not self._group.is_alive(), saving_s)
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
        pid, name = self._group.leader.pid, self._group.name
        with suppress(OSError):  # a full disk must not stop the signals
            self._record("signal", f"TERM to {name}: {why}", signal="TERM", pid=pid)
        self._group.signal(signal.SIGTERM)
        if self._wait(lambda: not self._group.is_alive(), self._limits.term_grace_s):
            return "terminated"
        with suppress(OSError):  # as above
            message = f"KILL to the session of {name}: TERM had no effect"
            self._record("signal", message, signal="KILL", pid=pid)
        self._group.kill()
        if self._wait(lambda: not self._group.is_alive(), _KILL_WAIT_S):
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
