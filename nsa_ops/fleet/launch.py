"""Launch one run on several pods of ours: each refuses by itself, and they must fit together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nsa_core.rundir.manifest import RunManifest
from nsa_ops.agents import ask, find_run_manifest
from nsa_ops.context import Operator, PodLink, RunHandle
from nsa_ops.errors import StateConflictError
from nsa_ops.fleet.alike import check_pods, require_alike, require_same_kernels, with_num_pods
from nsa_ops.fleet.meeting import DEFAULT_PORT, Meeting, meeting_notes, notes_of, rank_map
from nsa_ops.fleet.reachability import probe_meeting
from nsa_ops.fleet.start import start_fleet
from nsa_ops.plan import Plan, Step, plan_of
from nsa_ops.pod.messages import JoinAttemptAction
from nsa_ops.pods.known import choose_pod
from nsa_ops.quantities import count_of
from nsa_ops.remote.snapshot import Snapshot, has_code, take_snapshot
from nsa_ops.runs.attempt import AttemptStart, ship_to
from nsa_ops.runs.checkpoints import with_parent_as_planned
from nsa_ops.runs.choose import record_of
from nsa_ops.runs.launch import (
    Launched,
    LaunchRequest,
    launched_of,
    make_run_directory,
    manifest_of,
    ready_pod,
    require_run_id,
)
from nsa_ops.runs.lease import Takeover, require_unmoved
from nsa_ops.runs.windows import start_step
from nsa_ops.store import MemberPod, RunRecord


@dataclass(frozen=True)
class FleetMember:
    """One pod of a planned attempt: the run there, and its manifest."""

    run: RunHandle
    manifest: RunManifest


@dataclass(frozen=True)
class FleetPlan:
    """A launch on several pods that may be done.

    Attributes:
        members: By node rank.
        known: The run as the registry knew it; None for a new one.
    """

    members: tuple[FleetMember, ...]
    snapshot: Snapshot
    known: RunRecord | None
    plan: Plan
    trainer_module: str

    @property
    def runs(self) -> tuple[RunHandle, ...]:
        """The run on each pod, by node rank."""
        return tuple(one.run for one in self.members)


def plan_fleet(
    operator: Operator, request: LaunchRequest, pods: Sequence[str], port: int | None = None
) -> FleetPlan:
    """Everything that can be refused is refused here, before anything changes.

    Args:
        operator: Who asks.
        request: The same as for one pod; its `pod` is not used.
        pods: Names, in the order of their node ranks as far as the network allows.
        port: Where the ranks are to meet on pod 0; None for the usual one.

    Raises:
        ConfigurationError: If the configuration cannot be used, or is another one on each pod.
        RefusedError: If a guardrail, a preflight or the network between the pods forbids it.
        StateConflictError: If the run is known on other pods.
        OpsError: As `plan_launch`, for each pod.
    """
    require_run_id(request.run_id)
    names = check_pods(pods)
    known = operator.store.find_run(request.run_id)
    _refuse_other_pods(known, names)
    if known is not None:  # its places among the pods stay
        names = tuple(one.pod for one in known.members)
    links = [operator.link(choose_pod(operator.store, name)) for name in names]
    launch = with_num_pods(request, len(names))
    snapshot = take_snapshot()
    ready = [ready_pod(operator, launch, link, snapshot) for link in links]
    require_alike(
        {one.link.record.name: (one.resolved.profile, one.resolved.config) for one in ready},
        "Name one that all match: `--profile NAME`",
    )
    for one in ready[1:]:
        require_same_kernels(ready[0], one)
    manifest = manifest_of(operator, launch, ready[0], snapshot)
    there = read_places(links, manifest.run_id) if known is not None else None
    is_first_fixed = known is not None or bool(launch.resume_from)
    meeting = there or probe_meeting(
        operator, links, port or DEFAULT_PORT, is_first_fixed=is_first_fixed
    )
    ready = [ready[i] for i in meeting.order]
    manifest = with_parent_as_planned(ready[0].link, manifest)
    members = tuple(
        FleetMember(
            RunHandle(one.link, snapshot.code_id, manifest.run_id),
            manifest.model_copy(
                update={
                    "node": node,
                    "pod_id": one.link.record.pod_id,
                    "pod_facts": one.proof.pod_facts,
                    "preflight_sha256": one.proof.sha256,
                }
            ),
        )
        for one, node in zip(ready, meeting.nodes, strict=True)
    )
    notes = [
        *rank_map({one.run.pod: one.manifest for one in members}, meeting),
        *notes_of({one.link.record.name: one.notes for one in ready}),
        *meeting_notes(manifest, meeting),
    ]
    plan = _plan(members, snapshot, launch.trainer_module, notes)
    return FleetPlan(members, snapshot, known, plan, launch.trainer_module)


def _refuse_other_pods(known: RunRecord | None, names: Sequence[str]) -> None:
    if known is None or {one.pod for one in known.members} == set(names):
        return
    where = ", ".join(f"`{one.pod}`" for one in known.members)
    message = f"Run `{known.run_id}` is on pod {where}, and not on {', '.join(names)}"
    hint = f"Continue it there: `nsa-ops resume {known.run_id} --pods {','.join(names)}`"
    raise StateConflictError(message, hint=hint)


def read_places(links: Sequence[PodLink], run_id: str) -> Meeting | None:
    """Where a run that was launched before meets; None where a pod does not have it yet."""
    found = [find_run_manifest(link, run_id) for link in links]
    nodes = [one.node for one in found if one is not None]
    if len(nodes) < len(links):
        return None
    order = tuple(range(len(links)))
    addresses = (nodes[0].address, *("" for _ in nodes[1:]))  # each pod knows that of pod 0 alone
    return Meeting(order, tuple(nodes), addresses, ())


def _plan(
    members: Sequence[FleetMember], snapshot: Snapshot, module: str, notes: Sequence[str]
) -> Plan:
    steps = []
    for one in members:
        link, code = one.run.link, one.run.link.code(snapshot.code_id)
        is_there = has_code(link.transport, link.record.python, code)
        steps.append(
            Step(f"ship code to {one.run.pod}", snapshot.size, files=(str(code),), is_done=is_there)
        )
    for rank, one in enumerate(members):
        what = "join" if rank else "prepare run"
        path = str(one.run.run_dir / "manifest.json")
        detail = f"configuration sha256 {one.manifest.config_sha256[:12]}"
        steps.append(Step(f"{what} on {one.run.pod}", detail, files=(path,)))
    for one in members:
        step = start_step(one.run, module)
        steps.append(replace(step, name=f"{step.name} on {one.run.pod}"))
    config, names = members[0].manifest.config, ", ".join(one.run.pod for one in members)
    title = (
        f"Launch {members[0].run.run_id} on pods {names}: "
        f"{count_of(config.schedule.steps, 'step')} of "
        f"{count_of(config.batch.tokens_per_step, 'token')}"
    )
    return plan_of(title, steps, notes)


def execute_fleet(operator: Operator, planned: FleetPlan) -> Launched:
    """Carry out a plan, on all pods or on none; repeated after a cut, it continues.

    Raises:
        StateConflictError: As `execute_launch`.
        OpsError: If a pod does not come up; all are stopped then.
    """
    first = planned.members[0]

    def begin() -> None:
        for one in planned.members:
            ship_to(operator, one.run.link, planned.snapshot)
        written = make_run_directory(first.run, first.manifest)
        register(operator, record_of(first.run.link, written), planned.runs)
        join_all(planned.members, written)

    start = AttemptStart(
        act="launch",
        runs=planned.runs,
        module=planned.trainer_module,
        take=lambda: [require_unmoved(operator, Takeover(planned.known))],
        begin=begin,
        may_be_started=True,
    )
    return launched_of(first.run, start_fleet(operator, start))


def register(operator: Operator, record: RunRecord, runs: Sequence[RunHandle]) -> None:
    """Let the registry name all pods of a run."""
    others = [MemberPod(run.pod, run.link.record.pod_id) for run in runs[1:]]
    operator.store.save_run(record.with_others(others))


def join_all(members: Sequence[FleetMember], first: RunManifest) -> None:
    """Have pods 1, 2 … take part in the attempt that pod 0 has; done before, it changes nothing."""
    for one in members[1:]:
        share = one.manifest
        place = {"address": first.node.address, "port": first.node.port}
        own = {
            "node": share.node.model_copy(update=place),
            "pod_id": share.pod_id,
            "pod_facts": share.pod_facts,
            "preflight_sha256": share.preflight_sha256,
        }
        manifest = first.model_copy(update=own)
        ask(one.run, JoinAttemptAction(run_dir=Path(one.run.run_dir), manifest=manifest))
