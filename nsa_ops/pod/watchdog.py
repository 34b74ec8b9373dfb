"""`python -m nsa_ops.pod.watchdog --run-dir D`: watch one run, stop it, restart it where allowed.

It reads the run directory, judges with `rules.judge`, and acts through `.HALT`, signals to recorded
processes and a new runner. It needs no terminal and ends when the run has ended for good.
"""

import argparse
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from nsa_core.config.base import one_line
from nsa_core.rundir import events
from nsa_core.rundir.bounded_json import read_last_records, read_records
from nsa_core.rundir.exit import ExitRecord, read_exit
from nsa_core.rundir.goodput import record_hang
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import ManifestError, read_manifest
from nsa_ops.pod.attempts import next_attempt_in_turn
from nsa_ops.pod.card_watch import CardWatch, mark_pod
from nsa_ops.pod.ending import (
    RESTARTED,
    RestartDecision,
    decide_after,
    write_missing_exit,
)
from nsa_ops.pod.enforce import Enforcer, StopOutcome, write_anomaly
from nsa_ops.pod.journal import WATCHDOG_ENDED, Journal, read_watchdog
from nsa_ops.pod.keep_watched import start_part
from nsa_ops.pod.leak import CHECKS_MODULE, SUSPICIONS, CausalityProbe
from nsa_ops.pod.messages import Doing, NextAttemptAction, ReplyCode
from nsa_ops.pod.processes import (
    LockHeldError,
    RunProcesses,
    is_running,
    read_processes,
    take_lock,
)
from nsa_ops.pod.rank_files import RankFiles
from nsa_ops.pod.read_run import (
    list_checkpoint_facts,
    newest_whole,
    read_machine_evidence,
    read_process_evidence,
)
from nsa_ops.pod.rules.rulebook import judge
from nsa_ops.pod.rules.verdict import ReportedFindings, Verdict
from nsa_ops.pod.runner import TRAINER_MODULE
from nsa_ops.pod.tracker import HealthEvidence, tracker_of
from nsa_ops.pod.trainer_group import group_of, is_trainer_running

_HISTORY_BYTES = 512 * 1024
_CHUNK_BYTES = 1024 * 1024
_LOCK_WAIT_S = 5.0
_RUNNER_WAIT_S = 5.0
_POLL_S = 0.1
#: What is noted at every look is noted again after so long.
_NOTE_AGAIN_S = 600.0


class Watchdog:
    """Watches one run through all attempts that it makes while it lives."""

    def __init__(
        self, run: RunDir, module: str = TRAINER_MODULE, checks: str = CHECKS_MODULE
    ) -> None:
        """Read what is watched."""
        self._run = run
        self._module = module
        self._checks = checks
        self._manifest = read_manifest(run)
        self._verdict = Verdict(level="healthy", sentence="not judged yet")
        self._journal = Journal(run)
        self._noted_at: dict[tuple[str, str], float] = {}
        self._reported = ReportedFindings()
        self._runner: subprocess.Popen[bytes] | None = None
        self._begun_at = time.monotonic()
        self._gave_up = False
        self._leaving_since: float | None = None
        self._restarts = len(events.find_events(run, RESTARTED))
        self._heartbeats = run.heartbeat(self._manifest.pod_ranks[0])
        history = read_last_records(self._heartbeats, Heartbeat, _HISTORY_BYTES)
        self._offset = history.offset
        self._ranks = RankFiles(run, self._manifest)
        before = read_watchdog(run)
        self._tracker = tracker_of(self._manifest, before.best_tokens_per_s if before else None)
        self._cards = self._new_card_watch()
        self._causality = CausalityProbe(run, self._manifest, checks)
        self._tracker.feed(history.records, time.monotonic())

    def watch(self) -> str:
        """Look again and again until the run has ended for good; why it has."""
        while True:
            end = self._try_to_look()
            if end:
                self._show("done", end)
                return end
            time.sleep(self._manifest.config.watchdog.interval_s)

    def end_by_signal(self, number: int, _frame: object) -> None:
        """Record the signal that ends this watchdog, and end it; the run is now unwatched."""
        name = signal.Signals(number).name
        self._note(
            WATCHDOG_ENDED, f"the watchdog got {name}: the run is no longer watched", signal=name
        )
        sys.exit(128 + number)

    def _new_card_watch(self) -> CardWatch:
        every_s = self._manifest.config.watchdog.cards_every_s
        return CardWatch(self._run, self._manifest.attempt, every_s=every_s)

    def _try_to_look(self) -> str:
        """As `_look`; a disk that fails for a moment, or for good, does not end the watch."""
        try:
            return self._look()
        except OSError as error:
            self._note_once("unreadable", f"this look at the run failed: {one_line(error)}")
            return ""

    def _look(self) -> str:
        """One look; why the run is over, or an empty string."""
        self._follow_attempt()
        self._read_beats()
        self._read_ranks()
        if self._runner is not None:
            self._runner.poll()
        record = read_processes(self._run, self._manifest.attempt)
        if record is None or record.trainer is None:
            return self._look_before_start(record)
        ended = self._read_end(record)
        if ended is not None:
            return self._after_end(ended)
        if not is_trainer_running(self._run, record) or self._is_leaving(record):
            return ""
        self._judge(record)
        if self._verdict.level == "halt":
            self._stop(record)
        return ""

    def _follow_attempt(self) -> None:
        """Begin anew when somebody has begun the next attempt."""
        manifest = read_manifest(self._run)
        if manifest.attempt != self._manifest.attempt:
            self._manifest = manifest
            self._tracker = tracker_of(manifest, self._tracker.best_rate)
            self._ranks = RankFiles(self._run, manifest)
            self._cards = self._new_card_watch()
            self._causality = CausalityProbe(self._run, manifest, self._checks)
            self._reported = ReportedFindings()
            self._noted_at.clear()
            self._gave_up = False
            self._leaving_since = None
            self._begun_at = time.monotonic()

    def _read_beats(self) -> None:
        while True:
            found = read_records(self._heartbeats, Heartbeat, self._offset, _CHUNK_BYTES)
            if found.problem:
                self._note_once("unreadable", found.problem)
            if found.torn:
                self._note(
                    "torn_line", f"{found.torn} heartbeat lines could not be read", torn=found.torn
                )
            if found.offset == self._offset:
                return
            self._offset = found.offset
            self._tracker.feed(found.records, time.monotonic())

    def _read_ranks(self) -> None:
        for lines in self._ranks.read():
            if lines.problem:
                self._note_once("unreadable", lines.problem)
            self._tracker.feed_rank(lines.rank, lines.beats, lines.problem, time.monotonic())

    def _look_before_start(self, record: RunProcesses | None) -> str:
        """No trainer was started yet: wait for the runner, but not for ever."""
        limit_s = self._manifest.config.watchdog.first_beat_limit_s
        waited_s = time.monotonic() - self._begun_at
        ended = read_exit(self._run, self._manifest.attempt)
        if ended is not None:
            return self._after_end(ended)
        if waited_s > limit_s and not (record and is_running(record.runner)):
            return f"no trainer was started within {limit_s:.0f} s"
        self._show("watching", "waiting for the runner to start the trainer")
        return ""

    def _read_end(self, record: RunProcesses) -> ExitRecord | None:
        """How the attempt ended; written here if the trainer and its runner are both gone."""
        if is_trainer_running(self._run, record):
            return None
        end = time.monotonic() + _RUNNER_WAIT_S
        while is_running(record.runner) and time.monotonic() < end:
            time.sleep(_POLL_S)
        try:
            return write_missing_exit(self._run, self._manifest)
        except OSError as error:  # tried again at the next look
            self._show("watching", f"the trainer is gone; its end cannot be written: {error}")
            return None

    def _is_leaving(self, record: RunProcesses) -> bool:
        """The trainer has written its exit and still runs; one that will not go is ended."""
        ended = read_exit(self._run, self._manifest.attempt)
        if ended is None:
            return False
        self._show("watching", f"the trainer ends: {ended.reason}")
        limit_s = self._manifest.config.watchdog.phase_limit_s
        if self._leaving_since is None:
            self._leaving_since = time.monotonic()
        if time.monotonic() - self._leaving_since > limit_s and not self._gave_up:
            why = f"it wrote its exit record {limit_s:.0f} s ago and still runs"
            self._end_with(record, lambda enforcer: enforcer.end(why))
        return True

    def _judge(self, record: RunProcesses) -> None:
        self._verdict = judge(self._evidence(record), self._manifest.config.watchdog)
        if {finding.rule for finding in self._verdict.findings} & SUSPICIONS and self._probe():
            self._verdict = judge(self._evidence(record), self._manifest.config.watchdog)
        for finding in self._reported.take(self._verdict.findings, time.monotonic()):
            kind = "anomaly" if finding.level == "halt" else "warning"
            self._note(kind, finding.sentence, rule=finding.rule, **finding.facts)
        self._show("watching", self._verdict.sentence)

    def _evidence(self, record: RunProcesses) -> HealthEvidence:
        checkpoints = list_checkpoint_facts(self._run)
        cards, causality = self._cards.look(), self._causality.read()
        return self._tracker.evidence(
            time.monotonic(),
            read_process_evidence(self._run, self._manifest, record, checkpoints),
            read_machine_evidence(self._run, checkpoints, cards, causality),
        )

    def _probe(self) -> bool:
        """Start the causality probe, once an attempt; whether it was started now."""
        try:
            started = self._causality.start()
        except OSError as error:  # the suspicion alone decides then
            self._note("causality_probe", f"the causality probe cannot be started: {error}")
            return False
        if started:
            self._note("causality_probe", "a loss is too good: the causality probe runs")
        return started

    def _stop(self, record: RunProcesses) -> None:
        """Enforce the verdict, unless that was tried to the end before."""
        if not self._gave_up:
            self._show("halting", self._verdict.sentence)
            mark_pod(self._run, self._verdict)
            self._end_with(record, lambda enforcer: enforcer.stop(self._verdict))

    def _end_with(self, record: RunProcesses, act: Callable[[Enforcer], StopOutcome]) -> None:
        group = group_of(self._run, record)
        if group is None:
            return
        enforcer = Enforcer(self._run, self._manifest, group, self._journal.show_again)
        outcome = act(enforcer)
        self._gave_up = outcome == "unkillable"
        self._note("halt_done", f"the trainer {outcome}", outcome=outcome)

    def _after_end(self, ended: ExitRecord) -> str:
        """Restart what may be restarted; else say why the run is over."""
        with suppress(OSError):  # the next attempt counts it as well
            record_hang(self._run, ended)
        decision = decide_after(self._run, self._manifest, ended)
        if not decision.restart:
            if ended.code not in (0, 10):
                self._leave_anomaly(ended)
            self._note("not_restarted", decision.why, code=ended.code)
            return decision.why
        self._show("restarting", decision.why)
        return self._restart(decision)

    def _leave_anomaly(self, ended: ExitRecord) -> None:
        if not self._run.anomaly.exists():
            sentence = f"ended with code {ended.code}: {ended.reason}"
            verdict = Verdict(level="halt", rule="process_gone", sentence=sentence)
            write_anomaly(self._run, verdict, self._manifest.attempt)

    def _restart(self, decision: RestartDecision) -> str:
        """Begin the next attempt and start a runner for it; why that failed, or nothing."""
        checkpoint_step = newest_whole(list_checkpoint_facts(self._run))
        asked = NextAttemptAction(
            run_dir=self._run.root, from_attempt=self._manifest.attempt,
            changes={"resume": "auto"}, by="watchdog",
        )  # fmt: skip
        try:
            reply = next_attempt_in_turn(asked, wait_s=_RUNNER_WAIT_S)
        except OSError as error:
            self._note("not_restarted", f"the next attempt cannot be begun: {error}")
            return str(error)
        if reply.code != ReplyCode.OK:
            self._note("not_restarted", reply.message)
            return reply.message
        self._follow_attempt()
        self._note(
            RESTARTED, f"attempt {self._manifest.attempt} begins because {decision.why}",
            checkpoint_step=checkpoint_step,
        )  # fmt: skip
        self._restarts += 1
        self._runner = start_part("runner", self._run, self._module)
        return ""

    def _note_once(self, kind: str, message: str) -> None:
        """Note what is found at every look, and again only after a while."""
        now_s = time.monotonic()
        if now_s - self._noted_at.get((kind, message), -math.inf) > _NOTE_AGAIN_S:
            self._noted_at[kind, message] = now_s
            self._note(kind, message)

    def _note(self, kind: str, message: str, **facts: object) -> None:
        self._journal.note(self._manifest.attempt, kind, message, **facts)

    def _show(self, doing: Doing, why: str) -> None:
        self._journal.show(
            self._manifest.attempt, self._verdict, doing, why, restarts=self._restarts,
            best_tokens_per_s=self._tracker.best_rate,
        )  # fmt: skip


def take_watch(run: RunDir) -> int:
    """The lock of the one watchdog; a predecessor that is just ending is waited for.

    Raises:
        LockHeldError: If another watchdog watches this run.
    """
    return take_lock(run.watchdog_lock, wait_s=_LOCK_WAIT_S)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m nsa_ops.pod.watchdog", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--module", default=TRAINER_MODULE, help="Python module that trains")
    parser.add_argument("--checks", default=CHECKS_MODULE, help="Python module that probes")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Watch until the run has ended for good; 6 is no run, 7 is watched by another."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    given = _parse(arguments)
    run = RunDir(given.run_dir.resolve())
    try:
        read_manifest(run)
        lock = take_watch(run)
    except ManifestError as error:
        sys.stderr.write(f"error: {error}\n")
        return ReplyCode.NOT_FOUND
    except LockHeldError:
        sys.stderr.write(f"error: run {run.run_id} already has a watchdog\n")
        return ReplyCode.CONFLICT
    try:
        watchdog = Watchdog(run, given.module, given.checks)
        signal.signal(signal.SIGTERM, watchdog.end_by_signal)
        watchdog.watch()
    except ManifestError as error:  # somebody has removed the run
        sys.stderr.write(f"error: {error}\n")
        return ReplyCode.NOT_FOUND
    finally:
        os.close(lock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
