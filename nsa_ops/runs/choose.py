"""Which run is meant: the named one, or the only one that fits."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nsa_core.rundir.layout import check_run_id
from nsa_core.rundir.manifest import RunManifest
from nsa_ops.agents import ask_each, probe, probe_run, read_run_manifest
from nsa_ops.context import Operator, PodLink, RunHandle
from nsa_ops.errors import ConfigurationError, NotFoundError, OpsError
from nsa_ops.pod.messages import RunReport
from nsa_ops.pods.known import choose_pod, how_to_add
from nsa_ops.quantities import sentence_case
from nsa_ops.runs.members import MemberReport, look_at_run, merge, others_of
from nsa_ops.store import PodRecord, RunRecord

LIVE = frozenset({"planned", "staging", "starting", "running", "halting", "resuming"})
#: Those with a process that trains, will train, or still ends.
LIVING = LIVE - {"planned"}
RESUMABLE = frozenset({"planned", "halted", "preempted", "failed", "lost"})


@dataclass(frozen=True)
class FoundRun:
    """A run, the transport to its pod, and what the pod shows of it.

    Of a run of several pods the transport is that to pod 0, and the report that of all pods.
    """

    record: RunRecord
    link: PodLink
    report: RunReport

    @property
    def run(self) -> RunHandle:
        """The run as its pod's agent is asked about it."""
        return handle_of(self.link, self.record)


@dataclass(frozen=True)
class PodRuns:
    """The runs of one pod as it shows them.

    Attributes:
        reports: What it shows, by run id, newest first.
        problem: Why it could not be asked, in one line; says nothing about its runs.
        unreadable: Why it cannot read a run that it has, by run id.
    """

    pod: str
    reports: list[RunReport]
    problem: str = ""
    unreadable: Mapping[str, str] = field(default_factory=dict)

    def member(self, run_id: str, node_rank: int) -> MemberReport:
        """What it shows of one run."""
        report = next((one for one in self.reports if one.run_id == run_id), None)
        problem = self.problem or self.unreadable.get(run_id, "its directory is not on the pod")
        return MemberReport(self.pod, node_rank, report, "" if report else problem)


def handle_of(link: PodLink, record: RunRecord) -> RunHandle:
    """A run of the registry as its pod's agent is asked about it."""
    return RunHandle(link, record.code_id, record.run_id)


def link_of(operator: Operator, run: RunRecord) -> PodLink:
    """The transport to the pod of a run.

    Raises:
        NotFoundError: If its pod was forgotten.
    """
    pod = operator.store.find_pod(run.pod)
    if pod is None:
        message = f"Run `{run.run_id}` is on pod `{run.pod}`, which is no longer known"
        raise NotFoundError(message, hint=how_to_add(run.pod))
    return operator.link(pod)


def find_run(
    operator: Operator,
    run_id: str | None,
    *,
    among: Collection[str] | None = None,
    pod: str | None = None,
) -> FoundRun:
    """The named run, or the only one known, or the only one in one of these states.

    Args:
        operator: Who asks.
        run_id: Its id; None to look for the one that fits.
        among: States that fit; None for any.
        pod: Pod to look on; None for the one that the registry names.

    Raises:
        NotFoundError: If there is none.
        ConfigurationError: If several fit.
    """
    if pod is None:
        record = choose_record(operator, run_id, among=among)
        link = link_of(operator, record)
        others = others_of(operator, record)
        return FoundRun(record, link, look_at_run(operator, handle_of(link, record), others))
    run_id = run_id if run_id is not None else choose_record(operator, None, among=among).run_id
    known = _known(operator, run_id)
    link = operator.link(choose_pod(operator.store, pod))
    if known is None or known.pod != link.record.name:  # it left that pod, or is not known here
        known = record_of(link, read_named_manifest(link, known.run_id if known else run_id))
    return FoundRun(known, link, probe_run(handle_of(link, known)))


def read_named_manifest(link: PodLink, run_id: str) -> RunManifest:
    """The manifest of a run that somebody has named."""
    try:
        return read_run_manifest(link, check_run_id(run_id))
    except NotFoundError as error:
        pod = link.record.name
        message = f"Pod `{pod}` has no run `{run_id}` below `{link.runs}`"
        hint = f"See `nsa-ops run ls`, and `nsa-ops pod show {pod}` for its root"
        raise NotFoundError(message, hint=hint) from error
    except ValueError as error:
        raise ConfigurationError(sentence_case(str(error)), hint="See `nsa-ops run ls`") from error


def record_of(link: PodLink, manifest: RunManifest) -> RunRecord:
    """A run of a pod as the registry keeps it."""
    pod = link.record
    return RunRecord(
        run_id=manifest.run_id,
        pod=pod.name,
        recipe=manifest.config.recipe,
        profile=manifest.profile,
        code_id=manifest.code_id,
        config_sha256=manifest.config_sha256,
        launched_unix_s=manifest.created_unix_s,
        pod_id=pod.pod_id,
        attempt=manifest.attempt,
        attempt_id=manifest.attempt_id,
    )


def choose_record(
    operator: Operator, run_id: str | None, *, among: Collection[str] | None = None
) -> RunRecord:
    """As `find_run`, without looking at the named run."""
    if run_id is not None:
        return _require_known(operator, run_id)
    runs = operator.store.runs(operator.settings.values.pod or None)
    if not runs:
        message = "No run was launched from here yet"
        hint = (
            "Launch one with `nsa-ops launch --profile NAME`, or let this laptop know one of a "
            "colleague with `nsa-ops run adopt --pod POD`"
        )
        raise NotFoundError(message, hint=hint)
    if len(runs) == 1:
        return runs[0]
    looked = look_at_pods(operator, runs) if among else []  # a pod that is silent has no reports
    fitting = [run for run in runs if among and look_among(run, looked).state in among]
    if len(fitting) == 1:
        return fitting[0]
    candidates = fitting or runs
    names = ", ".join(f"`{run.run_id}`" for run in candidates[:5])
    more = ", …" if len(candidates) > 5 else ""
    message = f"Which run? {len(candidates)} fit: {names}{more}"
    raise ConfigurationError(message, hint="Name one; see `nsa-ops run ls`")


def look_among(run: RunRecord, looked: Sequence[PodRuns]) -> MemberReport:
    """What the pod of a run shows of it, merged with what its other pods show; pure."""
    pods = {one.pod: one for one in looked}
    members = [pods[one.pod].member(run.run_id, rank) for rank, one in enumerate(run.members)]
    first, *others = members
    if first.report is None or not others:
        return first
    return replace(first, report=merge(first.report, run.pod, others))


def _require_known(operator: Operator, run_id: str) -> RunRecord:
    known = _known(operator, run_id)
    if known is not None:
        return known
    message = f"No run `{run_id}` was launched from here"
    hint = "See `nsa-ops run ls`; for a colleague's run, first use `nsa-ops run adopt --pod POD`"
    raise NotFoundError(message, hint=hint)


def _known(operator: Operator, run_id: str) -> RunRecord | None:
    """The run of this id, or the only one whose id begins so; None if it is not known."""
    found = operator.store.find_run(run_id)
    beginning = [run for run in operator.store.runs() if run.run_id.startswith(run_id)]
    return found or (beginning[0] if len(beginning) == 1 else None)


def look_at_pods(operator: Operator, runs: Sequence[RunRecord]) -> list[PodRuns]:
    """What every pod of these runs shows, one round trip a pod; one that fails says so.

    The pods are asked at once, so the slowest one decides how long it takes.
    """
    names = dict.fromkeys(one.pod for run in runs for one in run.members)
    pods = {name: operator.store.find_pod(name) for name in names}

    def look(name: str) -> PodRuns:
        pod = pods[name]
        if pod is None:
            return PodRuns(name, [], "no longer known")
        there = [run for run in runs if name in {one.pod for one in run.members}]
        return _look(operator, pod, there)

    return ask_each(list(pods), look)


def _look(operator: Operator, pod: PodRecord, runs: Sequence[RunRecord]) -> PodRuns:
    try:
        document = probe(operator.link(pod), runs[0].code_id)
    except OpsError as error:
        return PodRuns(pod.name, [], error.message)
    known = {run.run_id for run in runs}
    reports = [report for report in document.runs if report.run_id in known]
    unreadable = {one.run_id: one.message for one in document.problems}
    return PodRuns(pod.name, reports, unreadable=unreadable)
