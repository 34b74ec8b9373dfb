"""What becomes of an act that was cut off: decided from what is true now, and nothing else."""

from dataclasses import dataclass
from typing import Any, Literal

from nsa_ops.pod.messages import RunReport
from nsa_ops.runs.choose import LIVE
from nsa_ops.store import Intent, PodRecord, RunRecord

#: `done`: it was done; `rolled back`: nothing of it is left, or what is left is removed;
#: `adopt`: it was done, and the registry learns of it; `start`: the last step is done now;
#: `halt`: a trainer that must not run is halted; `wait`: nobody can tell yet.
Way = Literal["done", "rolled back", "adopt", "start", "halt", "wait"]

RUN_ACTS = frozenset({"launch", "resume", "halt", "leave pod"})
_POD_ACTS = frozenset({"pod add", "pod rm", "pod trust"})


@dataclass(frozen=True)
class Truth:
    """What is true about the subject of an act now.

    Attributes:
        is_held: The command that began it is still at work.
        problem: Why its pod cannot be asked; empty if it could be, or need not be.
        pod: Pod that the act is about, as the registry knows it; None if it does not.
        run: Run that it is about, as the registry knows it.
        report: What the pod shows of the run; None if it is not there.
    """

    is_held: bool = False
    problem: str = ""
    pod: PodRecord | None = None
    run: RunRecord | None = None
    report: RunReport | None = None


@dataclass(frozen=True)
class Decision:
    """What is done about one open intent.

    Attributes:
        way: What.
        found: What is true, in one sentence.
    """

    way: Way
    found: str


def detail_of(intent: Intent) -> dict[str, Any]:
    """What was written down beside act and subject."""
    return intent.details


def decide(intent: Intent, truth: Truth) -> Decision:
    """What becomes of one act; pure."""
    if truth.is_held:
        return Decision("wait", "another nsa-ops is still at work on it")
    if truth.problem:
        return Decision("wait", truth.problem)
    if intent.act in _POD_ACTS:
        return _decide_pod(intent, truth)
    if intent.act not in RUN_ACTS:
        return Decision("rolled back", "what was whole is kept; repeat it, and it goes on there")
    if truth.pod is None:
        return Decision("rolled back", "its pod is no longer known, so nothing can be compared")
    if intent.act == "halt":
        return _decide_halt(truth.report)
    if intent.act == "leave pod":
        return _decide_left(intent, truth.report)
    return _decide_start(intent, truth)


def _decide_pod(intent: Intent, truth: Truth) -> Decision:
    pod, wanted = truth.pod, detail_of(intent).get("pod_id")
    if intent.act == "pod rm":
        if pod is None:
            return Decision("done", "the pod is forgotten")
        return Decision("rolled back", "the pod is still known; repeat `pod rm`")
    if pod is not None and wanted in {None, pod.pod_id}:
        return Decision("done", "the registry knows the pod")
    return Decision("rolled back", "the registry does not know it; a key pinned for it is removed")


def _decide_halt(report: RunReport | None) -> Decision:
    if report is None:
        return Decision("rolled back", "the run is not on its pod any more")
    if report.state not in LIVE:
        return Decision("done", f"the run is {report.state}: {report.why}")
    if report.halt is not None:
        return Decision("done", f"the stop request stands; the run is {report.state}")
    return Decision("rolled back", "no stop request was written and the run goes on; halt it again")


def _decide_left(intent: Intent, report: RunReport | None) -> Decision:
    """A run that went on elsewhere while nobody answered here must not train here, too."""
    if report is None or report.state not in LIVE - {"planned"}:
        state = "not there" if report is None else report.state
        return Decision(
            "done", f"the pod that `{intent.subject}` left answers; it is {state} there"
        )
    pod = detail_of(intent).get("pod", "")
    by_hand = f"`nsa-ops halt {intent.subject} --pod {pod}` halts it by hand"
    return Decision("halt", f"it also runs on pod `{pod}`, which it left: {report.why}; {by_hand}")


def _decide_start(intent: Intent, truth: Truth) -> Decision:
    """A launch or a resume: was anything begun, and does it run?"""
    report, detail = truth.report, detail_of(intent)
    if report is None:
        return Decision("rolled back", "nothing of it is on the pod; repeat it")
    elsewhere = _went_elsewhere(intent, truth)
    if elsewhere:
        return Decision("rolled back", elsewhere)
    attempt = report.manifest.attempt
    begun = attempt > int(detail.get("from_attempt", 0))
    is_restored_only = (
        "moved_from" in detail
        and truth.pod is not None
        and (report.manifest.pod_id != truth.pod.pod_id)
    )
    if not begun or is_restored_only:
        copy = "the restored copy is there, and " if is_restored_only else ""
        return Decision("rolled back", f"{copy}the next attempt was not begun; repeat it")
    if report.state == "planned":
        return Decision("start", f"attempt {attempt} is prepared and was never started")
    where = f"attempt {attempt} is {report.state}: {report.why}"
    if _is_registered(intent, truth):
        return Decision("done", where)
    return Decision("adopt", f"{where}; the registry did not know")


def _went_elsewhere(intent: Intent, truth: Truth) -> str:
    """Why an act that was cut off is not finished: the run is on another pod since."""
    detail, run = detail_of(intent), truth.run
    if run is None or "pod" not in detail or run.pod in {detail["pod"], detail.get("moved_from")}:
        return ""
    return (
        f"the run is on pod `{run.pod}` since; what is left on `{detail['pod']}` is not touched: "
        f"see `nsa-ops status {run.run_id} --pod {detail['pod']}`"
    )


def _is_registered(intent: Intent, truth: Truth) -> bool:
    pod = detail_of(intent).get("pod")
    return truth.run is not None and pod in {None, truth.run.pod}
