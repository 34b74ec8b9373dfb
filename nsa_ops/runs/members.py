"""The pods of a run of several: what each shows of its part, and what that means for the run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from nsa_core.rundir.status import State
from nsa_ops.agents import ask_each, probe_run
from nsa_ops.context import Operator, RunHandle
from nsa_ops.errors import OpsError
from nsa_ops.pod.messages import Offsets, PodShare, RunReport, keep_own
from nsa_ops.pod.rank_ending import LOST_ELSEWHERE
from nsa_ops.pod.rank_evidence import RankEvidence
from nsa_ops.pod.rules.rulebook import RULES
from nsa_ops.pod.rules.verdict import Finding, Verdict, conclude
from nsa_ops.runs.slow_pod import find_slow_pod
from nsa_ops.runs.wait import ENDED
from nsa_ops.store import MemberPod, RunRecord

#: Of findings of one level, that of the first rule becomes the verdict, as on a pod.
_ORDER = {rule.id: place for place, rule in enumerate(RULES)}
#: The worst end first: that of a run is the worst of its pods.
_WORST: tuple[State, ...] = ("failed", "lost", "preempted", "halted", "finished")


@dataclass(frozen=True)
class MemberReport:
    """What one pod of a run shows of it.

    Attributes:
        report: None if it could not be asked, or does not have the run.
        problem: Why there is no report.
        run: The run on that pod; None if the pod is not to be found.
        error: What came of asking it; None if it answered.
    """

    pod: str
    node_rank: int
    report: RunReport | None
    problem: str = ""
    run: RunHandle | None = None
    error: OpsError | None = None

    @property
    def state(self) -> State | None:
        """Its own state; None if unknown."""
        return self.report.state if self.report is not None else None


def look_at_run(
    operator: Operator,
    run: RunHandle,
    others: Mapping[str, RunHandle | None],
    offsets: Offsets | None = None,
) -> RunReport:
    """What the pod of a run shows, and for a run of several pods what all of them make of it.

    Args:
        operator: Who asks.
        run: The run on its pod, or on pod 0.
        others: The run on its other pods, as `others_of` gives them.
        offsets: Where the last look at pod 0 stopped reading.

    Raises:
        OpsError: If pod 0 cannot be asked; what the others show is told.
    """
    if not others:
        return probe_run(run, offsets)
    first, *rest = ask_pods(
        {run.pod: run, **others},
        lambda asked: probe_run(asked, offsets if asked is run else None),
    )
    if first.report is not None:
        return merge(first.report, run.pod, rest)
    for one in rest:
        state = one.report.state if one.report else f"unknown ({one.problem})"
        operator.tell(f"pod {one.pod}, pod {one.node_rank} of `{run.run_id}`: {state}")
    raise first.error or AssertionError(first)


def ask_pods(
    runs: Mapping[str, RunHandle | None],
    look: Callable[[RunHandle], RunReport | None] = probe_run,
) -> list[MemberReport]:
    """What each pod shows of a run, all asked at once; one that cannot be asked says why.

    `runs`: by the name of the pod, pod 0 first; None for one that is not to be found.
    """

    def ask(rank: int) -> MemberReport:
        pod, run = pods[rank]
        if run is None:
            return MemberReport(pod, rank, None, "no longer known, or another machine by now")
        try:
            return MemberReport(pod, rank, look(run), run=run)
        except OpsError as error:
            return MemberReport(pod, rank, None, error.message, run, error)

    pods = list(runs.items())
    return ask_each(range(len(pods)), ask)


def runs_of(operator: Operator, record: RunRecord) -> dict[str, RunHandle | None]:
    """A run on each of its pods, pod 0 first; None for a pod that is not to be found.

    Pod 0 may be another machine by now: its run is restored there from the backup.
    """
    first = run_on(operator, MemberPod(record.pod, ""), record.code_id, record.run_id)
    return {record.pod: first, **others_of(operator, record)}


def others_of(operator: Operator, record: RunRecord) -> dict[str, RunHandle | None]:
    """The same without pod 0."""
    return {one.pod: run_on(operator, one, record.code_id, record.run_id) for one in record.others}


def run_on(operator: Operator, member: MemberPod, code_id: str, run_id: str) -> RunHandle | None:
    """A run on one of its pods; None if that is no longer known, or another machine by now."""
    pod = operator.store.find_pod(member.pod)
    if pod is None or member.pod_id not in {"", pod.pod_id}:
        return None
    return RunHandle(operator.link(pod), code_id, run_id)


def merge(first: RunReport, pod: str, others: Sequence[MemberReport]) -> RunReport:
    """The report of pod 0 with the state of the whole run, and what its other pods add; pure."""
    per_pod = first.manifest.ranks_per_pod or len(first.ranks)
    members = [
        _with_own_ranks(one, per_pod, first.manifest.steps)
        for one in (MemberReport(pod, 0, first), *(_of_attempt(one, first) for one in others))
    ]
    state, why = derive_state(members)
    ranks = tuple(_ranks(members))
    flags = [f"pod `{one.pod}` says nothing: {one.problem}" for one in members if not one.report]
    for one in members[1:]:
        flags += [f"pod `{one.pod}`: {flag}" for flag in _flags(one)]
    values = {
        "state": state,
        "why": why,
        "flags": [*_flags(members[0]), *flags],
        "verdict": judge_together(members, ranks),
        "pods": [_share(one) for one in members],
        "ranks": ranks,
    }
    return first.model_copy(update=values)


def _ranks(members: Sequence[MemberReport]) -> Iterator[RankEvidence]:
    """The ranks of all pods, each with the pod that it runs on."""
    for one in members:
        for rank in one.report.ranks if one.report is not None else ():
            yield rank.model_copy(update={"pod": one.pod})


def _with_own_ranks(one: MemberReport, per_pod: int, steps: int) -> MemberReport:
    """The same with the ranks that the place of this pod gives it, as pod 0 counts them.

    One that claims a step which the run does not have would make all others look late.
    """
    if one.report is None:
        return one
    report = keep_own(one.report, one.node_rank, per_pod)
    ranks = tuple(
        rank.model_copy(update={"problem": f"it claims step {rank.step:,} of {steps:,}"})
        if rank.step > steps
        else rank
        for rank in report.ranks
    )
    return replace(one, report=report.model_copy(update={"ranks": ranks}))


def _flags(one: MemberReport) -> list[str]:
    return one.report.flags if one.report is not None else []


def _of_attempt(one: MemberReport, first: RunReport) -> MemberReport:
    """A pod that is at another attempt says nothing about this one."""
    if one.report is None:
        return one
    its, ours = one.report.manifest, first.manifest
    if its.attempt != ours.attempt:
        problem = f"it is at attempt {its.attempt}, and pod 0 at {ours.attempt}"
    elif its.attempt_id and ours.attempt_id and its.attempt_id != ours.attempt_id:
        problem = f"its attempt {its.attempt} is another one than that of pod 0"
    else:
        return one
    return replace(one, report=None, problem=problem)


def _share(one: MemberReport) -> PodShare:
    why = one.report.why if one.report is not None else one.problem
    return PodShare(pod=one.pod, node_rank=one.node_rank, state=one.state, why=why)


def derive_state(members: Sequence[MemberReport]) -> tuple[State, str]:
    """The state of a run of several pods, and the sentence that proves it; pure.

    It runs as long as pod 0 does and no other pod has ended. A pod that does not answer counts for
    nothing: the ranks of pod 0 cannot go on without its own.
    """
    known = [one for one in members if one.report is not None]
    ended = [one for one in known if one.state in ENDED]
    living = [one for one in known if one.state not in ENDED and one.state != "planned"]
    if ended and living:
        culprit = choose_culprit(ended)
        rest = ", ".join(f"`{one.pod}` ({one.state})" for one in living)
        return "halting", f"{_describe(culprit)}; the others end: {rest}"
    if ended:
        culprit = choose_culprit(ended)
        state = min((one.state for one in ended if one.state), key=_WORST.index)
        if culprit.report is not None and culprit.node_rank == 0:
            return state, culprit.report.why
        return state, _describe(culprit)
    unstarted = [one for one in known if one.state == "planned"]
    if living and unstarted:
        names = ", ".join(f"`{one.pod}`" for one in unstarted)
        return "starting", f"no process was started on pod {names}; {_describe(living[0])}"
    first = known[0]
    return first.state or "planned", first.report.why if first.report else ""


def choose_culprit(ended: Sequence[MemberReport]) -> MemberReport:
    """The pod whose end explains that of the others: the worst one that did not only follow."""

    def rank(one: MemberReport) -> tuple[bool, int]:
        exit_record = one.report.exit if one.report else None
        follows = exit_record is not None and exit_record.reason.startswith(LOST_ELSEWHERE)
        return follows, _WORST.index(one.state) if one.state in _WORST else len(_WORST)

    return min(ended, key=rank)


def _describe(one: MemberReport) -> str:
    return f"pod `{one.pod}` is {one.state}: {one.report.why if one.report else one.problem}"


def judge_together(members: Sequence[MemberReport], ranks: Sequence[RankEvidence]) -> Verdict:
    """What the rules found on all pods, and what only all pods together show, in the rules' order.

    That of pod 0 if nothing was found.
    """
    known = [one for one in members if one.report is not None]
    first = known[0].report
    limits = first.manifest if first is not None else None
    found = [finding for one in known for finding in _findings(one)]
    slow = limits and find_slow_pod(ranks, limits.straggler_factor, limits.straggler_records)
    if slow:
        is_same = (slow.rule, slow.subject)
        found = [one for one in found if (one.rule, one.subject) != is_same] + [slow]
    if found or first is None:
        return conclude(sorted(found, key=lambda one: _ORDER.get(one.rule, len(_ORDER))))
    return first.verdict


def _findings(one: MemberReport) -> list[Finding]:
    """What the rules found on a pod, which is named where it is not pod 0."""
    verdict = one.report.verdict if one.report is not None else None
    if verdict is None or verdict.level == "healthy":
        return []
    alone = Finding(
        rule=verdict.rule, level=verdict.level, sentence=verdict.sentence, facts=verdict.facts
    )
    found = verdict.findings or [alone]
    if one.node_rank == 0:
        return found
    return [
        each.model_copy(update={"sentence": f"pod `{one.pod}`: {each.sentence}"}) for each in found
    ]
