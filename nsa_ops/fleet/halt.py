"""Halt a run on several pods: pod 0 is asked, all ranks agree, and what does not end is ended."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nsa_core.rundir.redaction import redact
from nsa_ops.agents import ask
from nsa_ops.context import Operator, RunHandle
from nsa_ops.errors import PartialError, StateConflictError
from nsa_ops.fleet.start import stop_share
from nsa_ops.plan import Plan, Step, plan_of
from nsa_ops.pod.messages import HaltAction
from nsa_ops.runs.choose import LIVE, LIVING
from nsa_ops.runs.halt import GONE, GRACE_S, LADDER, Halted, outcome_of
from nsa_ops.runs.members import MemberReport, ask_pods, merge, runs_of
from nsa_ops.runs.wait import ENDED, POLL_S
from nsa_ops.store import RunRecord


@dataclass(frozen=True)
class FleetHalted:
    """A run that does not run on pod 0, with its checkpoint.

    Attributes:
        partial: Why it may live on elsewhere; None if every pod has ended.
    """

    halted: Halted
    partial: PartialError | None


@dataclass(frozen=True)
class FleetHalt:
    """A halt that may be done.

    Attributes:
        members: What each pod shows, by node rank.
    """

    record: RunRecord
    members: tuple[MemberReport, ...]
    reason: str

    @property
    def is_over(self) -> bool:
        """Every pod answers, and its part has ended."""
        return all(one.state in ENDED for one in self.members)

    @property
    def plan(self) -> Plan:
        """The same for people."""
        ask = Step(
            f"ask pod {self.record.pod}",
            f"write a stop request, which all ranks agree on: {redact(self.reason)}",
            is_done=self.members[0].state in ENDED,
        )
        wait = Step(
            "wait",
            "until it has saved and every pod has ended; a pod that does not follow gets TERM, "
            "then KILL",
            is_done=self.is_over,
        )
        shown = ", ".join(f"{one.pod} {one.state or 'does not answer'}" for one in self.members)
        return plan_of(f"Halt {self.record.run_id} ({shown})", [ask, wait])


def plan_fleet_halt(operator: Operator, record: RunRecord, reason: str) -> FleetHalt:
    """What halting a run on several pods does; a pod that does not answer is left for later.

    Raises:
        StateConflictError: If nothing of it lives on any pod.
        OpsError: If no pod answers.
    """
    members = ask_pods(runs_of(operator, record))
    if all(one.report is None for one in members):
        first = members[0]
        message = f"No pod of `{record.run_id}` answers; pod `{first.pod}`: {first.problem}"
        raise PartialError(message, hint="Repeat it when they do")
    states = {one.state for one in members if one.report is not None}
    if states <= GONE:
        why = "; ".join(f"`{one.pod}` is {one.state or 'unknown'}" for one in members)
        message = f"Nothing of run `{record.run_id}` lives: {why}"
        hint = f"Start it with `nsa-ops resume {record.run_id}`"
        raise StateConflictError(message, hint=hint)
    return FleetHalt(record, tuple(members), reason)


def execute_fleet_halt(operator: Operator, planned: FleetHalt) -> FleetHalted:
    """Halt all pods and return when a verified checkpoint exists, or say that there is none.

    Raises:
        PartialError: If pod 0 does not answer: nobody can look at its checkpoints.
        DeadlineError: If a pod lives on after TERM and KILL.
    """
    record = planned.record
    began_s = operator.clock.monotonic_s()
    signals: list[str] = []
    members: Sequence[MemberReport] = planned.members
    if not planned.is_over:
        detail = {"reason": planned.reason, "pod": record.pod, "code_id": record.code_id}
        pods = [one.pod for one in record.members]
        with operator.store.intent("halt", record.run_id, pods=pods, **detail):
            if members[0].run is not None and members[0].state in LIVE:
                members = _ask_pod_0(operator, members[0].run, planned)
            signals = _end_what_lives(operator, members, planned.reason)
            members = ask_pods(runs_of(operator, record))
    silent = [one for one in members if one.report is None]
    partial = _partial(record, silent) if silent else None
    first, run = members[0].report, members[0].run
    if first is None or run is None:
        raise partial or AssertionError(members)
    report = merge(first, record.pod, members[1:])
    halted = outcome_of(
        operator, run, report, began_s, was_running=not planned.is_over, signals=signals
    )
    return FleetHalted(halted, partial)


def _ask_pod_0(operator: Operator, run: RunHandle, planned: FleetHalt) -> list[MemberReport]:
    """Write the request and wait until nothing lives on any pod that answers, or time is over."""
    action = HaltAction(run_dir=Path(run.run_dir), reason=planned.reason, grace_s=GRACE_S)
    operator.tell(ask(run, action).message)
    end_s = operator.clock.monotonic_s() + GRACE_S
    with operator.work("waiting for the end on all pods"):
        while True:
            members = ask_pods(runs_of(operator, planned.record))
            states = {one.state for one in members if one.report is not None}
            is_over = states and not states & LIVING
            if is_over or operator.clock.monotonic_s() >= end_s:
                return members
            operator.clock.sleep(POLL_S)


def _end_what_lives(operator: Operator, members: Sequence[MemberReport], reason: str) -> list[str]:
    """TERM, then KILL, where something lives on; pod 0 last, as its checkpoint is the one."""
    signals = []
    for one in reversed(members):
        if one.run is None or one.state not in LIVING:
            continue
        operator.tell(f"pod {one.pod} has not ended; sending TERM")
        sent = stop_share(operator, one.run, reason, LADDER)
        signals += [f"{name} on {one.pod}" for name in sent]
    return signals


def _partial(record: RunRecord, silent: Sequence[MemberReport]) -> PartialError:
    names = ", ".join(f"`{one.pod}` ({one.problem})" for one in silent)
    message = f"Run `{record.run_id}` has ended where pods answer, and may live on pod {names}"
    rest = [one.pod for one in record.members if one.pod not in {each.pod for each in silent}]
    command = f"nsa-ops resume {record.run_id} --pods {','.join(rest)}"
    return PartialError(message, hint=f"Repeat it when the pod answers, or go on with `{command}`")
