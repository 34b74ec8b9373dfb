"""Ask a trainer for something: to stop, or to save a checkpoint now."""

from dataclasses import dataclass
from pathlib import Path

from nsa_core.rundir.checkpoint import CheckpointState
from nsa_core.rundir.redaction import redact
from nsa_ops.agents import ask, verify
from nsa_ops.context import Operator, RunHandle
from nsa_ops.errors import DeadlineError, NotFoundError, StateConflictError
from nsa_ops.plan import Plan, Step, plan_of
from nsa_ops.pod.messages import CheckpointFact, HaltAction, RunReport, SignalAction, SignalName
from nsa_ops.runs.choose import LIVE, FoundRun, find_run
from nsa_ops.runs.wait import ENDED, poll

GRACE_S = 60.0
#: Signals to a trainer that does not answer the request, and how long each may take.
LADDER: tuple[tuple[SignalName, float], ...] = (("TERM", 45.0), ("KILL", 20.0))
GONE = frozenset({"planned", "lost", "preempted"})
SAVE_S = 120.0


@dataclass(frozen=True)
class Halted:
    """A run that does not run.

    Attributes:
        was_running: It ran when the halt was asked for, or was about to be restarted.
        signals: Sent beside the request: nothing, TERM, or TERM and KILL.
        checkpoint: Newest whole checkpoint, every hash checked; None if there is none.
        damaged: Newer checkpoints that are not whole, each in one line.
        lost_steps: Steps behind the checkpoint that a resume does again; None if unknown.
        node_rank: Number of the pod, if one pod of several was meant; only pod 0 has checkpoints.
    """

    run_id: str
    attempt: int
    state: str
    why: str
    was_running: bool
    signals: list[str]
    step: int | None
    checkpoint: CheckpointState | None
    damaged: list[str]
    lost_steps: int | None
    seconds: float
    node_rank: int = 0


def plan_halt(
    operator: Operator, run_id: str | None, reason: str, pod: str | None = None
) -> tuple[FoundRun, Plan]:
    """The run that is meant, on a named pod where one is named, and what halting it does.

    Raises:
        StateConflictError: If its processes are gone: there is nothing to halt.
    """
    found = find_run(operator, run_id, among=LIVE, pod=pod)
    report = found.report
    if report.state in GONE:
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
            "wait",
            "until it has saved and ended; after the grace period TERM, then KILL",
            is_done=ended,
        ),
    ]
    return found, plan_of(f"Halt {report.run_id} ({report.state}, {report.why})", steps)


def execute_halt(operator: Operator, found: FoundRun, reason: str) -> Halted:
    """Halt a run and return when a verified checkpoint exists, or say that there is none.

    Raises:
        DeadlineError: If it neither answers the request nor ends after TERM and KILL.
    """
    run, report = found.run, found.report
    began_s = operator.clock.monotonic_s()
    if report.state in ENDED:
        return outcome_of(operator, run, report, began_s, was_running=False, signals=[])
    detail = {"reason": reason, "pod": run.pod, "code_id": run.code_id}
    with operator.store.intent("halt", run.run_id, **detail):
        run_dir = Path(report.run_dir)  # whichever attempt is current by then: the run is meant
        action = HaltAction(run_dir=run_dir, reason=reason, grace_s=GRACE_S)
        operator.tell(ask(run, action).message)
        # Pods 1, 2 … do not read the request: a signal to them is one that all ranks agree on.
        wait_s = 0.0 if report.manifest.node_rank else GRACE_S
        ended, signals = _await_or_signal(operator, found, wait_s)
    return outcome_of(operator, run, ended, began_s, was_running=True, signals=signals)


def _await_or_signal(
    operator: Operator, found: FoundRun, wait_s: float
) -> tuple[RunReport, list[str]]:
    """Wait for the end; when it does not come, TERM, then KILL, to the recorded trainer."""
    run_dir = Path(found.report.run_dir)
    signals: list[str] = []
    for name, next_wait_s in LADDER:
        try:
            return _await_end(operator, found, wait_s), signals
        except DeadlineError:
            operator.tell(f"no end within {wait_s:g} s; sending {name}")
            reason = "halt was not answered"
            ask(found.run, SignalAction(run_dir=run_dir, signal=name, reason=reason))
            signals.append(name)
            wait_s = next_wait_s
    return _await_end(operator, found, wait_s), signals


def _await_end(operator: Operator, found: FoundRun, deadline_s: float) -> RunReport:
    return poll(operator, found.run, lambda report: report.state in ENDED, deadline_s, "the end")


def outcome_of(
    operator: Operator,
    run: RunHandle,
    report: RunReport,
    began_s: float,
    *,
    was_running: bool,
    signals: list[str],
) -> Halted:
    """What a halt came to: the end of the run, and its checkpoint hashed."""
    verification = verify(run)
    checkpoint = verification.whole
    step = report.exit.step if report.exit else None
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
        lost_steps=max(0, step - checkpoint.step) if checkpoint and step else None,
        seconds=operator.clock.monotonic_s() - began_s,
        node_rank=report.manifest.node_rank,
    )


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was saved on request."""

    run_id: str
    checkpoint: CheckpointFact
    seconds: float


def save_now(operator: Operator, run_id: str | None) -> Saved:
    """Have a checkpoint saved at the next step boundary, and wait until it is whole.

    Raises:
        StateConflictError: If no trainer of the run is alive.
        NotFoundError: If the trainer ended without saving.
        DeadlineError: If none appears in time.
    """
    found = find_live(operator, run_id)
    before = {fact.name: fact.created_unix_s for fact in found.report.checkpoints if fact.whole}
    began_s = operator.clock.monotonic_s()
    operator.tell(send_signal(found.run, found.report, "USR2", "save now"))

    def is_new(report: RunReport) -> bool:
        return _newest_new(report, before) is not None or report.state in ENDED

    deadline_s = operator.deadline_s(SAVE_S)
    report = poll(operator, found.run, is_new, deadline_s, "a new checkpoint")
    checkpoint = _newest_new(report, before)
    if checkpoint is None:
        message = f"Run `{report.run_id}` ended without saving: {report.why}"
        raise NotFoundError(message, hint=f"See `nsa-ops status {report.run_id}`")
    return Saved(report.run_id, checkpoint, operator.clock.monotonic_s() - began_s)


def _newest_new(report: RunReport, before: dict[str, float | None]) -> CheckpointFact | None:
    for fact in report.checkpoints:
        if fact.whole and before.get(fact.name, "none") != fact.created_unix_s:
            return fact
    return None


def find_live(operator: Operator, run_id: str | None) -> FoundRun:
    """A run whose trainer can be asked for something.

    Raises:
        StateConflictError: If no trainer of it is alive.
    """
    found = find_run(operator, run_id, among=LIVE)
    report = found.report
    if report.state not in LIVE:
        message = f"Run `{report.run_id}` has no trainer to ask: {report.state}, {report.why}"
        raise StateConflictError(message, hint=f"See `nsa-ops status {report.run_id}`")
    return found


def send_signal(run: RunHandle, report: RunReport, signal: SignalName, reason: str) -> str:
    """Have the pod of a run signal the trainer of the attempt that was reported; its answer."""
    action = SignalAction(
        run_dir=Path(report.run_dir),
        attempt=report.manifest.attempt,
        signal=signal,
        reason=reason,
    )
    return ask(run, action).message
