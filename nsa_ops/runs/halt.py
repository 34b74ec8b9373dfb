"""Halt: ask a run to stop, wait, and say which verified checkpoint it left."""

from dataclasses import dataclass
from pathlib import Path

from nsa_core.rundir.redaction import redact
from nsa_ops.agents import ask, verify
from nsa_ops.context import Operator
from nsa_ops.errors import DeadlineError, StateConflictError
from nsa_ops.plan import Plan, Step, plan_of
from nsa_ops.pod.messages import HaltAction, RunReport, SignalAction, SignalName
from nsa_ops.pod.verify import VerifiedCheckpoint
from nsa_ops.runs.choose import LIVE, FoundRun, find_run
from nsa_ops.runs.wait import ENDED, poll

GRACE_S = 60.0
#: What a trainer that does not answer the request is told, and how long each may take.
LADDER: tuple[tuple[SignalName, float], ...] = (("TERM", 45.0), ("KILL", 20.0))
_GONE = frozenset({"planned", "lost", "preempted"})


@dataclass(frozen=True)
class Halted:
    """A run that does not run.

    Attributes:
        run_id: Its id.
        attempt: Attempt that ended.
        state: What it is now.
        why: The evidence for it.
        was_running: It ran when the halt was asked for, or was about to be restarted.
        signals: What it had to be told beside the request: nothing, TERM, or TERM and KILL.
        step: Optimizer steps done; None if no exit was recorded.
        checkpoint: Newest whole checkpoint, every hash checked; None if there is none.
        damaged: Newer checkpoints that are not whole, each in one line.
        lost_steps: Steps behind the checkpoint that a resume does again; None if unknown.
        seconds: How long it took.
    """

    run_id: str
    attempt: int
    state: str
    why: str
    was_running: bool
    signals: list[str]
    step: int | None
    checkpoint: VerifiedCheckpoint | None
    damaged: list[str]
    lost_steps: int | None
    seconds: float


def plan_halt(
    operator: Operator, run_id: str | None, reason: str, pod: str | None = None
) -> tuple[FoundRun, Plan]:
    """The run that is meant, on a named pod where one is named, and what halting it does.

    Raises:
        StateConflictError: If its processes are gone: there is nothing to halt.
    """
    found = find_run(operator, run_id, among=LIVE, pod=pod)
    report = found.report
    if report.state in _GONE:
        message = f"Run `{report.run_id}` is {report.state}: {report.why}"
        hint = f"Start it with `nsa-ops resume {report.run_id}`"
        raise StateConflictError(message, hint=hint)
    ended = report.state in ENDED
    steps = [
        Step(
            "ask",
            f"write a stop request for attempt {report.manifest.attempt}: {redact(reason)}",
            files=(f"{report.run_dir}/.HALT",),
            is_done=ended,
        ),
        Step(
            "wait", "until it has saved and ended; TERM, then KILL, after the grace", is_done=ended
        ),
    ]
    return found, plan_of(f"Halt {report.run_id} ({report.state}, {report.why})", steps)


def execute_halt(
    operator: Operator, found: FoundRun, reason: str, *, grace_s: float = GRACE_S
) -> Halted:
    """Halt a run and return when a verified checkpoint exists, or say that there is none.

    Raises:
        DeadlineError: If it neither answers the request nor ends after TERM and KILL.
    """
    run, link, report = found.record, found.link, found.report
    began_s = operator.clock.monotonic_s()
    if report.state in ENDED:
        return _outcome(operator, found, report, began_s, was_running=False, signals=[])
    detail = {"reason": reason, "pod": link.record.name, "code_id": run.code_id}
    with operator.store.intent("halt", run.run_id, **detail):
        run_dir = Path(report.run_dir)  # whichever attempt is current by then: the run is meant
        action = HaltAction(run_dir=run_dir, reason=reason, grace_s=grace_s)
        operator.tell(ask(link, run.code_id, action).message)
        ended, signals = _await_or_signal(operator, found, grace_s)
    return _outcome(operator, found, ended, began_s, was_running=True, signals=signals)


def _await_or_signal(
    operator: Operator, found: FoundRun, grace_s: float
) -> tuple[RunReport, list[str]]:
    """Wait for the end; when it does not come, TERM, then KILL, to the recorded trainer."""
    run, run_dir = found.record, Path(found.report.run_dir)
    signals: list[str] = []
    wait_s = grace_s
    for name, next_wait_s in LADDER:
        try:
            return _await_end(operator, found, wait_s), signals
        except DeadlineError:
            operator.tell(f"no end within {wait_s:g} s; sending {name}")
            reason = "halt was not answered"
            action = SignalAction(run_dir=run_dir, signal=name, reason=reason)
            ask(found.link, run.code_id, action)
            signals.append(name)
            wait_s = next_wait_s
    return _await_end(operator, found, wait_s), signals


def _await_end(operator: Operator, found: FoundRun, deadline_s: float) -> RunReport:
    run = found.record
    return poll(
        operator, found.link, run.code_id, run.run_id,
        lambda report: report.state in ENDED, deadline_s, "the end",
    )  # fmt: skip


def _outcome(
    operator: Operator,
    found: FoundRun,
    report: RunReport,
    began_s: float,
    *,
    was_running: bool,
    signals: list[str],
) -> Halted:
    verification = verify(found.link, found.record.code_id, run_id=report.run_id)
    checkpoint = verification.whole
    step = report.exit.step if report.exit else None
    known = checkpoint is not None and step is not None
    return Halted(
        run_id=report.run_id,
        attempt=report.manifest.attempt,
        state=report.state,
        why=report.why,
        was_running=was_running,
        signals=signals,
        step=step,
        checkpoint=checkpoint,
        damaged=verification.damaged,
        lost_steps=max(0, step - checkpoint.step) if known and checkpoint and step else None,
        seconds=operator.clock.monotonic_s() - began_s,
    )
