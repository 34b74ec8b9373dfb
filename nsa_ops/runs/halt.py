"""Halt: ask a run to stop, wait, and say which verified checkpoint it left."""

from dataclasses import dataclass
from pathlib import Path

from nsa_ops.errors import DeadlineError, StateConflictError
from nsa_ops.plan import Plan, Step, plan_of
from nsa_ops.pod.messages import HaltAction, RunReport, SignalAction
from nsa_ops.pod.verify import VerifiedCheckpoint
from nsa_ops.runs.agents import ask, verify
from nsa_ops.runs.choose import LIVE, FoundRun, find_run
from nsa_ops.runs.context import Operator
from nsa_ops.runs.wait import ENDED, poll

GRACE_S = 60.0
TERM_S = 45.0
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
        needed_term: It did not answer the request and was told by signal.
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
    needed_term: bool
    step: int | None
    checkpoint: VerifiedCheckpoint | None
    damaged: list[str]
    lost_steps: int | None
    seconds: float


def plan_halt(operator: Operator, run_id: str | None, reason: str) -> tuple[FoundRun, Plan]:
    """The run that is meant and what halting it does.

    Raises:
        StateConflictError: If its processes are gone: there is nothing to halt.
    """
    found = find_run(operator, run_id, among=LIVE)
    report = found.report
    if report.state in _GONE:
        message = f"Run `{report.run_id}` is {report.state}: {report.why}"
        hint = f"Start it with `nsa-ops resume {report.run_id}`"
        raise StateConflictError(message, hint=hint)
    ended = report.state in ENDED
    steps = [
        Step(
            "ask",
            f"write a stop request for attempt {report.manifest.attempt}: {reason}",
            files=(f"{report.run_dir}/.HALT",),
            is_done=ended,
        ),
        Step(
            "wait", "until it has saved a checkpoint and ended; TERM after the grace", is_done=ended
        ),
    ]
    return found, plan_of(f"Halt {report.run_id} ({report.state}, {report.why})", steps)


def execute_halt(
    operator: Operator, found: FoundRun, reason: str, *, grace_s: float = GRACE_S
) -> Halted:
    """Halt a run and return when a verified checkpoint exists, or say that there is none.

    Raises:
        DeadlineError: If it neither answers the request nor ends after TERM.
    """
    run, link, report = found.record, found.link, found.report
    began_s = operator.clock.monotonic_s()
    if report.state in ENDED:
        return _outcome(operator, found, report, began_s, was_running=False, needed_term=False)
    with operator.store.intent("halt", run.run_id, reason=reason):
        run_dir = Path(report.run_dir)  # whichever attempt is current by then: the run is meant
        action = HaltAction(run_dir=run_dir, reason=reason, grace_s=grace_s)
        operator.tell(ask(link, run.code_id, action).message)
        needed_term = False
        try:
            ended = _await_end(operator, found, grace_s)
        except DeadlineError:
            needed_term = True
            operator.tell(f"no end within {grace_s:g} s; sending TERM")
            term = SignalAction(run_dir=run_dir, signal="TERM", reason="halt was not answered")
            ask(link, run.code_id, term)
            ended = _await_end(operator, found, TERM_S)
    return _outcome(operator, found, ended, began_s, was_running=True, needed_term=needed_term)


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
    needed_term: bool,
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
        needed_term=needed_term,
        step=step,
        checkpoint=checkpoint,
        damaged=verification.damaged,
        lost_steps=max(0, step - checkpoint.step) if known and checkpoint and step else None,
        seconds=operator.clock.monotonic_s() - began_s,
    )
