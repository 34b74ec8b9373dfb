"""Reconcile: compare each act that was cut off with its pod, and finish it or roll it back."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa_ops.agents import ask, probe_run, read_run_manifest
from nsa_ops.context import Operator, PodLink
from nsa_ops.doors import target_of
from nsa_ops.errors import NotFoundError, OpsError, PartialError
from nsa_ops.plan import Plan, Step, plan_of
from nsa_ops.pod.messages import HaltAction, RunReport
from nsa_ops.quantities import count_of, format_time
from nsa_ops.remote.snapshot import has_code
from nsa_ops.remote.ssh.host_keys import unpin
from nsa_ops.runs.launch import remember_run
from nsa_ops.runs.lease import holding, lease_held, require_unmoved
from nsa_ops.runs.reconcile_decide import (
    RUN_ACTS,
    Decision,
    Truth,
    Way,
    decide,
    detail_of,
)
from nsa_ops.runs.session import TRAINER_MODULE, start_session
from nsa_ops.store import Intent, PodRecord


@dataclass(frozen=True)
class Settled:
    """One act that was cut off, and what became of it.

    Attributes:
        number: Number of the intent.
        act: What was begun, such as `launch`.
        subject: Run or pod.
        began_unix_s: When.
        way: What is done about it.
        found: What is true, in one sentence.
    """

    number: int
    act: str
    subject: str
    began_unix_s: float
    way: Way
    found: str


@dataclass(frozen=True)
class ReconcilePlan:
    """What will be done about each open intent."""

    decided: list[tuple[Intent, Truth, Decision]]

    @property
    def plan(self) -> Plan:
        """The same for people."""
        steps = [
            Step(
                f"{intent.act} {intent.subject}",
                f"of {format_time(intent.at)}: {decision.way}; {decision.found}",
                is_done=decision.way == "wait",
            )
            for intent, _, decision in self.decided
        ]
        return plan_of(f"Reconcile {count_of(len(steps), 'cut-off act')}", steps)


def count_cut_off(operator: Operator) -> int:
    """Acts that nobody has finished and nobody is at work on; no pod is asked."""
    store = operator.store
    return sum(not store.is_held(intent) for intent in store.open_intents())


def plan_reconcile(operator: Operator) -> ReconcilePlan:
    """Look at each open intent and at what is true about it now; changes nothing."""
    decided = []
    for intent in operator.store.open_intents():
        truth = _look(operator, intent)
        decided.append((intent, truth, decide(intent, truth)))
    return ReconcilePlan(decided)


def _look(operator: Operator, intent: Intent) -> Truth:
    store, detail = operator.store, detail_of(intent)
    if store.is_held(intent):
        return Truth(is_held=True)
    if intent.act not in RUN_ACTS:
        return Truth(pod=store.find_pod(intent.subject))
    run = store.find_run(intent.subject)
    name = detail.get("pod") or (run.pod if run else "")
    pod = store.find_pod(name)
    if pod is None:
        return Truth(run=run)
    code_id = detail.get("code_id") or (run.code_id if run else "")
    try:
        report = _report(operator.link(pod), code_id, intent.subject)
    except OpsError as error:
        return Truth(problem=error.message, pod=pod, run=run)
    return Truth(pod=pod, run=run, report=report)


def _report(link: PodLink, code_id: str, run_id: str) -> RunReport | None:
    """What the pod shows of a run; None if it has neither the run nor the code to look at it."""
    if not code_id or not has_code(link.transport, link.record.python, link.code(code_id)):
        return None
    try:
        return probe_run(link, code_id, run_id)
    except NotFoundError:
        return None


def execute_reconcile(operator: Operator, planned: ReconcilePlan) -> list[Settled]:
    """Do what was decided, and close each intent that is settled."""
    settled = []
    for intent, truth, decision in planned.decided:
        found = decision
        if decision.way != "wait":
            try:
                _act(operator, intent, truth, decision.way)
            except OpsError as error:  # the next ones are looked at all the same
                found = Decision("wait", f"{decision.found}; {error.message}")
            else:
                outcome = f"reconciled, {decision.way}: {decision.found}"
                operator.store.end_intent(intent.id, outcome)
        settled.append(
            Settled(intent.id, intent.act, intent.subject, intent.at, found.way, found.found)
        )
    return settled


def unsettled(settled: Sequence[Settled]) -> PartialError | None:
    """What it means that something could not be told yet; None if everything could."""
    waiting = [one for one in settled if one.way == "wait"]
    if not waiting:
        return None
    acts = count_of(len(settled), "act")
    message = f"Still open: {len(waiting)} of {acts}: {waiting[0].found}"
    return PartialError(message, hint="Repeat `nsa-ops reconcile` when the pod answers")


def _act(operator: Operator, intent: Intent, truth: Truth, way: Way) -> None:
    detail = detail_of(intent)
    if way in {"adopt", "start"} and truth.pod is not None:
        link = operator.link(truth.pod)
        with lease_held(operator, intent.subject):
            if truth.run is not None:
                require_unmoved(operator, truth.run)
            code_id = _adopt(operator, link, truth, intent.subject)
            if way == "start":
                module = detail.get("module") or TRAINER_MODULE
                start_session(link, code_id, intent.subject, module)
    elif way == "halt" and truth.pod is not None and truth.report is not None:
        reason = "the run goes on on another pod"
        action = HaltAction(run_dir=Path(truth.report.run_dir), reason=reason, by="reconcile")
        ask(operator.link(truth.pod), str(detail.get("code_id")), action)
    elif way == "rolled back" and intent.act in {"pod add", "pod trust"}:
        _unpin(operator, detail, truth.pod)


def _adopt(operator: Operator, link: PodLink, truth: Truth, run_id: str) -> str:
    """Let the registry name the pod and the code that the run has there; the code's id."""
    manifest = read_run_manifest(link, run_id)
    if truth.run is None:
        remember_run(operator, link, manifest)
    else:
        operator.store.save_run(holding(truth.run, link, manifest))
    return manifest.code_id


def _unpin(operator: Operator, detail: dict[str, Any], pod: PodRecord | None) -> None:
    """Remove the host key that was pinned for a pod, or an identity, never registered."""
    pod_id, address = detail.get("pod_id"), detail.get("address") or (pod.address if pod else "")
    if not pod_id or not address:
        return
    stray = PodRecord("", pod_id, "ssh", "/", "", "", 0.0, address)
    target = target_of(stray, operator.settings)
    if target.known_hosts.is_file():
        unpin(target)
