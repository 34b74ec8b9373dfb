"""Reconcile: compare each act that was cut off with its pod, and finish it or roll it back."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nsa_ops.agents import ask, probe_run, read_run_manifest
from nsa_ops.context import Operator, RunHandle, target_of
from nsa_ops.errors import NotFoundError, OpsError, PartialError
from nsa_ops.plan import Plan, Step, plan_of
from nsa_ops.pod.messages import HaltAction, RunReport, SignalAction
from nsa_ops.quantities import count_of, format_time
from nsa_ops.remote.snapshot import has_code
from nsa_ops.remote.ssh.host_keys import unpin
from nsa_ops.runs.choose import LIVE, LIVING, record_of
from nsa_ops.runs.lease import LEAVE_POD, Takeover, holding, lease_held, require_unmoved
from nsa_ops.runs.members import MemberReport, ask_pods, merge, run_on
from nsa_ops.runs.wait import ENDED
from nsa_ops.runs.windows import TRAINER_MODULE, start_session
from nsa_ops.store import Intent, MemberPod, PodRecord, RunRecord

#: `done`: it was done; `rolled back`: nothing of it is left, or what is left is removed;
#: `adopt`: it was done, and the registry learns of it; `start`: the last step is done now;
#: `halt`: a trainer that must not run is halted; `wait`: nobody can tell yet.
Way = Literal["done", "rolled back", "adopt", "start", "halt", "wait"]

_RUN_ACTS = frozenset({"launch", "resume", "halt", LEAVE_POD})
_POD_ACTS = frozenset({"pod add", "pod rm", "pod trust"})


@dataclass(frozen=True)
class Truth:
    """What is true about the subject of an act now.

    Attributes:
        problem: Why its pod cannot be asked; empty if it could be, or need not be.
        pod: Pod that the act is about, as the registry knows it; None if it does not.
        report: What it shows of the run; of several pods, merged.
        others: Pods 1, 2 … of an act on several pods.
    """

    is_held: bool = False
    problem: str = ""
    pod: PodRecord | None = None
    run: RunRecord | None = None
    report: RunReport | None = None
    others: tuple[MemberReport, ...] = ()


@dataclass(frozen=True)
class Remedy:
    """What is done about one open intent."""

    way: Way
    found: str


@dataclass(frozen=True)
class Settled:
    """One act that was cut off, and what became of it."""

    number: int
    act: str
    subject: str
    began_unix_s: float
    way: Way
    found: str


@dataclass(frozen=True)
class ReconcilePlan:
    """What will be done about each open intent."""

    decided: list[tuple[Intent, Truth, Remedy]]

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
    store, detail = operator.store, intent.details
    if store.is_held(intent):
        return Truth(is_held=True)
    if intent.act not in _RUN_ACTS:
        return Truth(pod=store.find_pod(intent.subject))
    run = store.find_run(intent.subject)
    name = detail.get("pod") or (run.pod if run else "")
    pod = store.find_pod(name)
    if pod is None:
        return Truth(run=run)
    code_id = detail.get("code_id") or (run.code_id if run else "")
    names = (name, *(str(one) for one in detail.get("pods", [])[1:]))
    asked = [MemberPod(one, "") for one in names]
    runs = {one.pod: run_on(operator, one, code_id, intent.subject) for one in asked}
    first, *others = ask_pods(runs, _report)
    silent = next((one for one in (first, *others) if one.error is not None), None)
    if silent is not None:
        where = "" if silent is first else f"pod `{silent.pod}`: "
        return Truth(problem=f"{where}{silent.problem}", pod=pod, run=run)
    report = first.report
    if report is not None and others:
        report = merge(report, pod.name, [one for one in others if one.report])
    return Truth(pod=pod, run=run, report=report, others=tuple(others))


def _report(run: RunHandle) -> RunReport | None:
    """What the pod shows of a run; None if it has neither the run nor the code to look at it."""
    link, code_id = run.link, run.code_id
    if not code_id or not has_code(link.transport, link.record.python, link.code(code_id)):
        return None
    try:
        return probe_run(run)
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
                found = Remedy("wait", f"{decision.found}; {error.message}")
            else:
                outcome = f"reconciled, {decision.way}: {decision.found}"
                operator.store.end_intent(intent.id, outcome)
        settled.append(
            Settled(intent.id, intent.act, intent.subject, intent.at, found.way, found.found)
        )
    return settled


def unsettled(settled: Sequence[Settled]) -> PartialError | None:
    """What it means that something is not settled yet; None if everything is."""
    waiting = [one for one in settled if one.way == "wait"]
    if not waiting:
        return None
    acts = count_of(len(settled), "act")
    message = f"Still open: {len(waiting)} of {acts}: {waiting[0].found}"
    return PartialError(message, hint="Repeat `nsa-ops reconcile` when the pod answers")


def _act(operator: Operator, intent: Intent, truth: Truth, way: Way) -> None:
    pod, report = truth.pod, truth.report
    if way in {"adopt", "start"} and pod is not None:
        with lease_held(operator, intent.subject):
            require_unmoved(operator, Takeover(truth.run))
            run = _adopt(operator, pod, truth, intent.subject)
            if way == "start":
                _start(run, intent, truth)
    elif way == "halt" and pod is not None and report is not None:
        code_id = str(intent.details.get("code_id"))
        ask(RunHandle(operator.link(pod), code_id, intent.subject), _stop_left(report))
    elif way == "rolled back" and intent.act in {"pod add", "pod trust"}:
        _unpin(operator, intent, pod)


def _stop_left(report: RunReport) -> HaltAction | SignalAction:
    """What stops a run on a pod that it left; pods 1, 2 … of several read no stop request."""
    run_dir, reason = Path(report.run_dir), "the run continues on another pod"
    if report.manifest.node_rank:
        return SignalAction(run_dir=run_dir, signal="TERM", reason=reason, by="reconcile")
    return HaltAction(run_dir=run_dir, reason=reason, by="reconcile")


def _start(run: RunHandle, intent: Intent, truth: Truth) -> None:
    """Start what was never started, on every pod of the run."""
    module = intent.details.get("module") or TRAINER_MODULE
    states = {one.pod: one.state for one in truth.report.pods} if truth.report else {}
    for each in (run, *(one.run for one in truth.others if one.run is not None)):
        if states.get(each.pod, "planned") == "planned":
            start_session(each, module)


def _adopt(operator: Operator, pod: PodRecord, truth: Truth, run_id: str) -> RunHandle:
    """Let the registry name the pods and the code that the run has there."""
    link, known = operator.link(pod), truth.run
    manifest = read_run_manifest(link, run_id)
    record = holding(known, link, manifest) if known else record_of(link, manifest)
    pods = [one.run.link.record for one in truth.others if one.run is not None]
    record = record.with_others([MemberPod(pod.name, pod.pod_id) for pod in pods])
    operator.store.save_run(record)
    return RunHandle(link, manifest.code_id, run_id)


def _unpin(operator: Operator, intent: Intent, pod: PodRecord | None) -> None:
    """Remove the host key that was pinned for a pod, or an identity, never registered."""
    detail = intent.details
    pod_id, address = detail.get("pod_id"), detail.get("address") or (pod.address if pod else "")
    if not pod_id or not address:
        return
    stray = PodRecord("", pod_id, "ssh", "/", "", "", 0.0, address)
    target = target_of(stray, operator.settings)
    if target.known_hosts.is_file():
        unpin(target)


def decide(intent: Intent, truth: Truth) -> Remedy:
    """What becomes of one act; pure."""
    if truth.is_held:
        return Remedy("wait", "another nsa-ops is still at work on it")
    if truth.problem:
        return Remedy("wait", truth.problem)
    if intent.act in _POD_ACTS:
        return _decide_pod(intent, truth)
    if intent.act not in _RUN_ACTS:
        return Remedy("rolled back", "what was whole is kept; repeat it, and it continues there")
    if truth.pod is None:
        return Remedy("rolled back", "its pod is no longer known, so nothing can be compared")
    if intent.act == "halt":
        return _decide_halt(truth.report)
    if intent.act == LEAVE_POD:
        return _decide_left(intent, truth.report)
    return _decide_start(intent, truth)


def _decide_pod(intent: Intent, truth: Truth) -> Remedy:
    pod, wanted = truth.pod, intent.details.get("pod_id")
    if intent.act == "pod rm":
        if pod is None:
            return Remedy("done", "the pod is forgotten")
        return Remedy("rolled back", "the pod is still known; repeat `pod rm`")
    if pod is not None and wanted in {None, pod.pod_id}:
        return Remedy("done", "the registry knows the pod")
    return Remedy("rolled back", "the registry does not know it; a key pinned for it is removed")


def _decide_halt(report: RunReport | None) -> Remedy:
    if report is None:
        return Remedy("rolled back", "the run is not on its pod any more")
    if report.state not in LIVE:
        return Remedy("done", f"the run is {report.state}: {report.why}")
    if report.halt is not None:
        return Remedy("done", f"the stop request is in place; the run is {report.state}")
    return Remedy("rolled back", "no stop request was written and the run continues; halt it again")


def _decide_left(intent: Intent, report: RunReport | None) -> Remedy:
    """A run that continued elsewhere while this pod did not answer must not train here, too."""
    if report is None or report.state not in LIVING:
        state = "not there" if report is None else report.state
        return Remedy("done", f"the pod that `{intent.subject}` left answers; it is {state} there")
    pod = intent.details.get("pod", "")
    by_command = f"`nsa-ops halt {intent.subject} --pod {pod}` halts it"
    return Remedy("halt", f"it also runs on pod `{pod}`, which it left: {report.why}; {by_command}")


def _decide_start(intent: Intent, truth: Truth) -> Remedy:
    """A launch or a resume: was anything begun, and does it run?"""
    report, detail = truth.report, intent.details
    if report is None:
        return Remedy("rolled back", "nothing of it is on the pod; repeat it")
    elsewhere = _went_elsewhere(intent, truth)
    if elsewhere:
        return Remedy("rolled back", elsewhere)
    attempt = report.manifest.attempt
    begun = attempt > int(detail.get("from_attempt", 0))
    there = _earlier(intent, truth, report)
    if not begun or there:
        return Remedy("rolled back", f"{there}the next attempt was not begun; repeat it")
    if truth.others:
        unfinished = decide_gang(attempt, report, truth.others)
        if unfinished is not None:
            return unfinished
    elif report.state == "planned":
        return Remedy("start", f"attempt {attempt} is prepared and was never started")
    where = f"attempt {attempt} is {report.state}: {report.why}"
    if _is_registered(intent, truth):
        return Remedy("done", where)
    return Remedy("adopt", f"{where}; the registry did not know it")


def _earlier(intent: Intent, truth: Truth, report: RunReport) -> str:
    """What a new pod 0 has of the run before the next attempt is begun there; empty if nothing."""
    if "moved_from" not in intent.details or truth.pod is None:
        return ""
    if report.manifest.node_rank > 0:
        return "its share of an earlier attempt is there, and "
    is_copy = report.manifest.pod_id != truth.pod.pod_id
    return "the restored copy is there, and " if is_copy else ""


def decide_gang(attempt: int, report: RunReport, others: Sequence[MemberReport]) -> Remedy | None:
    """What is done about an attempt that is not on all its pods; None if it was started; pure."""
    absent = [
        one.pod for one in others if one.report is None or one.report.manifest.attempt != attempt
    ]
    shares = [share for share in report.pods if share.pod not in absent]
    unstarted = [share.pod for share in shares if share.state == "planned"]
    ended = [share.pod for share in shares if share.state in ENDED]
    if absent and len(unstarted) == len(shares):
        names = ", ".join(f"`{pod}`" for pod in absent)
        return Remedy("rolled back", f"attempt {attempt} is not on pod {names} yet; repeat it")
    if absent:
        command = f"`nsa-ops halt {report.run_id}`"
        return Remedy("wait", f"attempt {attempt} lives without pod `{absent[0]}`: {command}")
    if unstarted and not ended:
        names = ", ".join(f"`{pod}`" for pod in unstarted)
        return Remedy(
            "start", f"attempt {attempt} is prepared and was never started on pod {names}"
        )
    return None


def _went_elsewhere(intent: Intent, truth: Truth) -> str:
    """Why an act that was cut off is not finished: the run is on another pod since."""
    detail, run = intent.details, truth.run
    if run is None or "pod" not in detail or run.pod in {detail["pod"], detail.get("moved_from")}:
        return ""
    return (
        f"the run is on pod `{run.pod}` since; what is left on `{detail['pod']}` is not touched: "
        f"see `nsa-ops status {run.run_id} --pod {detail['pod']}`"
    )


def _is_registered(intent: Intent, truth: Truth) -> bool:
    pod = intent.details.get("pod")
    return truth.run is not None and pod in {None, truth.run.pod}
