"""Resume a run on another pod, on several or on fewer: pod 0's checkpoints are what it continues.

If pod 0 itself is left out, its newest verified backup becomes the run directory of the new pod 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nsa_core.config.compare import ChangedValue, differing_values
from nsa_core.config.run import RunConfig
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import Node, RunManifest
from nsa_ops.agents import ask, find_run_manifest, read_run_manifest
from nsa_ops.backup.restore import restore_to_pod
from nsa_ops.context import Operator, PodLink, RunHandle
from nsa_ops.errors import ConfigurationError
from nsa_ops.fleet.alike import NUM_PODS, check_pods, num_pods_set, require_alike
from nsa_ops.fleet.launch import FleetMember, join_all, register
from nsa_ops.fleet.leave import grounds_for, leave_pods, refuse_living_shares
from nsa_ops.fleet.meeting import DEFAULT_PORT, Meeting, meeting_notes, rank_map
from nsa_ops.fleet.move import choose_code, differences_of, next_manifest
from nsa_ops.fleet.reachability import probe_meeting
from nsa_ops.fleet.source import (
    FleetResumeRequest,
    Source,
    find_in_backup,
    find_on_pod,
    with_restore,
)
from nsa_ops.fleet.start import start_fleet
from nsa_ops.machine.host import read_host
from nsa_ops.plan import Plan, Step, plan_of
from nsa_ops.pod.messages import SetAsideAction
from nsa_ops.pods.known import choose_pod
from nsa_ops.preflight.proof import note_another_probed, refuse_marked
from nsa_ops.remote.snapshot import Snapshot
from nsa_ops.runs.attempt import AttemptStart, ship_to, start_attempt
from nsa_ops.runs.checkpoints import refuse_full_disk, refuse_other_model, refuse_trained
from nsa_ops.runs.choose import RESUMABLE, choose_record
from nsa_ops.runs.lease import Takeover, holding, require_unmoved, unsettled_notes
from nsa_ops.runs.resume import (
    Resumed,
    changed_config,
    next_attempt_action,
    resumed_of,
    with_config,
)
from nsa_ops.runs.windows import require_tmux, start_step
from nsa_ops.store import RunRecord


@dataclass(frozen=True)
class FleetResumePlan:
    """A resume on other pods, or on several, that may be done.

    Attributes:
        members: By node rank, each with its manifest as it will be.
        left: Pods that the run leaves.
        snapshots: By pod, code to ship; None where it has it.
    """

    record: RunRecord
    source: Source
    members: tuple[FleetMember, ...]
    left: tuple[Takeover, ...]
    snapshots: Mapping[str, Snapshot | None]
    notes: list[str]

    @property
    def runs(self) -> tuple[RunHandle, ...]:
        """The run on each pod, by node rank."""
        return tuple(one.run for one in self.members)

    @property
    def differences(self) -> list[ChangedValue]:
        """What the new attempt does not share with the one before."""
        return differences_of(self.source.trained or self.source.old, self.members[0].manifest)

    @property
    def is_begun(self) -> bool:
        """The attempt was begun before and never started, as after a cut: it only starts."""
        old, new = self.source.old, self.members[0].manifest
        return (
            self.source.is_unstarted
            and not differing_values(old.config, new.config)
            and ((old.node, old.resume, old.code_id) == (new.node, new.resume, new.code_id))
        )

    @property
    def attempt(self) -> int:
        """Number of the attempt that is started."""
        return self.source.old.attempt + (0 if self.is_begun else 1)

    @property
    def moved_from(self) -> str:
        """Pod 0 as it was; empty if it stays."""
        return self.record.pod if self.record.pod != self.runs[0].pod else ""

    @property
    def plan(self) -> Plan:
        """The same for people."""
        source, runs = self.source, self.runs
        where = f"from step {source.step}" if source.checkpoint else "from the first step"
        steps = [
            Step(f"ship code to {run.pod}", run.code_id, is_done=self.snapshots[run.pod] is None)
            for run in runs
        ]
        for run in source.aside:
            detail = "rename its share of an earlier attempt; nothing is lost"
            steps.append(Step(f"set aside on {run.pod}", detail, files=(str(run.run_dir),)))
        if source.restore is not None:
            copied = source.restore.plan.steps[0].detail
            steps.append(Step(f"restore to {runs[0].pod}", copied, files=(str(runs[0].run_dir),)))
        files = (f"{runs[0].run_dir}/manifest.json",)
        begun = f"begin attempt {self.attempt} {where}"
        steps.append(Step("next attempt", begun, files=files, is_done=self.is_begun))
        steps += [Step(f"join on {run.pod}", f"attempt {self.attempt}") for run in runs[1:]]
        for run in runs:
            step = start_step(run, source.module)
            steps.append(replace(step, name=f"{step.name} on {run.pod}"))
        passed = [f"passed over a damaged checkpoint: {one}" for one in source.damaged]
        passed += source.restore.plan.notes if source.restore is not None else ()
        notes = [*self.notes, *passed, *(f"differs: {one}" for one in self.differences)]
        pods, left = ", ".join(run.pod for run in runs), ", ".join(one.left for one in self.left)
        title = f"Resume {self.record.run_id} on {pods} {where}{left and f', not on {left}'}"
        return plan_of(title, steps, notes)


def plan_fleet_resume(operator: Operator, request: FleetResumeRequest) -> FleetResumePlan:
    """Look at every pod, kept, new or left, and refuse here what can be refused.

    Raises:
        StateConflictError: If anything of the run lives, or it finished.
        PodUnreachableError: If a pod that it is to continue on does not answer.
        ConfigurationError: If the batch does not divide, the pods do not fit together, or no step
            is left to train.
        RefusedError: If a guardrail, a preflight or the network forbids it.
        NotFoundError: If there is no checkpoint, or no backup where pod 0 is left.
    """
    record = choose_record(operator, request.run_id, among=RESUMABLE)
    names = check_pods(request.pods or tuple(one.pod for one in record.members))
    stays = record.pod in names
    if stays:  # its checkpoints are there
        names = (record.pod, *(name for name in names if name != record.pod))
    links = [operator.link(choose_pod(operator.store, name)) for name in names]
    refuse_living_shares(record, links)
    if stays:
        source = find_on_pod(record, links[0], request)
    else:
        source = find_in_backup(operator, record, links, request)
        links.sort(key=lambda link: link.record.name != source.copy_on)
    port = request.port or source.old.node.port or DEFAULT_PORT
    meeting = meet(operator, links, port, is_first_fixed=stays or bool(source.copy_on))
    links = [links[i] for i in meeting.order]
    if not stays:
        source = with_restore(operator, source, links[0])
    more_steps = bool(request.sets)
    left = leave_pods(
        operator, record, names, source.step, request.overrides, more_steps=more_steps
    )
    request = replace(request, overrides={**grounds_for(left), **request.overrides})
    snapshots = choose_codes(links, source.old, may_change=not stays)
    members = plan_members(operator, record, source, links, meeting, snapshots, request)
    first = members[0].manifest
    if source.checkpoint:
        _refuse_other_model(source, links[0], first.config)
        refuse_trained(source.step, first.config, may_only_end=not source.has_finished)
    refuse_full_disk(members[0].run, source.free_bytes, first.config, first.overrides)
    notes = unsettled_notes(operator.store, record.run_id)
    notes += [note for one in left for note in one.notes]
    proven = operator.store.newest_report(first.pod_id, first.code_id, first.profile)
    notes += note_another_probed(proven and proven[1], first.config)
    if len(members) > 1:
        notes += rank_map({one.run.pod: one.manifest for one in members}, meeting)
    notes += meeting_notes(first, meeting)
    return FleetResumePlan(record, source, members, tuple(left), snapshots, notes)


def _refuse_other_model(source: Source, link: PodLink, config: RunConfig) -> None:
    """Refuse a checkpoint of another model, on pod 0 or in the backup that becomes its run."""
    if source.restore is None:
        refuse_other_model(source.checkpoint, config, link)
    else:
        held = RunDir(source.restore.source).checkpoint(source.step)
        refuse_other_model(str(held), config)


def meet(
    operator: Operator, links: Sequence[PodLink], port: int, *, is_first_fixed: bool
) -> Meeting:
    """Where the ranks meet; one pod alone needs no network."""
    if len(links) == 1:
        return Meeting((0,), (Node(),), ("",), ())
    return probe_meeting(operator, links, port, is_first_fixed=is_first_fixed)


def choose_codes(
    links: Sequence[PodLink], old: RunManifest, *, may_change: bool
) -> dict[str, Snapshot | None]:
    """By pod, the code to ship: all pods get one version, that of the run as long as it can be had.

    Raises:
        ConfigurationError: If a pod lacks the run's code, and this checkout is another version.
    """
    found = {link.record.name: choose_code(link, old) for link in links}
    lacking = next((pod for pod, code in found.items() if code is not None), None)
    ours = next((code for code in found.values() if code is not None), None)
    if ours is None or ours.code_id == old.code_id:
        return found
    if not may_change:
        message = (
            f"Pod `{lacking}` lacks code {old.code_id} of the run, and this checkout is "
            f"{ours.code_id}"
        )
        hint = f"Check out commit {old.code_commit[:12]}, or continue without that pod"
        raise ConfigurationError(message, hint=hint)
    return dict.fromkeys(found, ours)


def plan_members(
    operator: Operator,
    record: RunRecord,
    source: Source,
    links: Sequence[PodLink],
    meeting: Meeting,
    snapshots: Mapping[str, Snapshot | None],
    request: FleetResumeRequest,
) -> tuple[FleetMember, ...]:
    """The manifest of each pod as it will be.

    Raises:
        ConfigurationError: If the pods come to different configurations or profiles.
    """
    sets, num_pods = request.sets, num_pods_set(request.sets, len(links))
    if source.old.config.runtime.num_pods != len(links):
        sets = (*sets, num_pods)
    kept = {(one.pod, one.pod_id) for one in record.members} if source.backup is None else set()
    members: list[FleetMember] = []
    for link, node in zip(links, meeting.nodes, strict=True):
        pod, code = link.record, snapshots[link.record.name]
        if (pod.name, pod.pod_id) in kept and code is None:
            manifest = _kept_share(operator, source, link, sets)
        else:
            manifest = next_manifest(
                operator, link, source.old, code,
                step=source.step, sets=sets, overrides=request.overrides,
            )  # fmt: skip
        overrides = {**source.old.overrides, **request.overrides}
        own = {
            "node": node, "pod_id": pod.pod_id, "resume": source.resume, "overrides": overrides
        }  # fmt: skip
        run = RunHandle(link, code.code_id if code else source.old.code_id, record.run_id)
        members.append(FleetMember(run, manifest.model_copy(update=own)))
    require_alike(
        {one.run.pod: (one.manifest.profile, one.manifest.config) for one in members},
        "Continue on pods of one profile",
    )
    return tuple(members)


def _kept_share(
    operator: Operator, source: Source, link: PodLink, sets: tuple[str, ...]
) -> RunManifest:
    """The next manifest of a pod that had the run before: its cards may have changed since."""
    pod, old = link.record, source.old
    host = read_host(link.transport, pod.python, pod.root)
    require_tmux(link, host)
    refuse_marked(link, {})
    there = find_run_manifest(link, old.run_id) or old  # that of pod 0 where it has none yet
    config = changed_config(operator, link, host, old, sets).config
    changed = {one.key for one in differing_values(old.config, config)}
    facts = {"pod_facts": there.pod_facts, "preflight_sha256": there.preflight_sha256}
    if changed <= {NUM_PODS}:  # what the kernels were proven for is the same
        facts["kernels"] = old.kernels
    return with_config(old, config).model_copy(update=facts)


def execute_fleet_resume(operator: Operator, planned: FleetResumePlan) -> Resumed:
    """Begin the next attempt on all its pods, or on none; the registry names them from then on."""
    source, first, record = planned.source, planned.members[0], planned.record
    start = AttemptStart(
        act="resume",
        runs=planned.runs,
        module=source.module,
        take=lambda: [
            require_unmoved(operator, Takeover(record)), *planned.left
        ],
        begin=lambda: begin_on_pods(operator, planned),
        detail={"from_attempt": planned.attempt - 1}
        | ({"moved_from": planned.moved_from} if planned.moved_from else {}),
    )  # fmt: skip
    beat = (start_fleet if len(planned.runs) > 1 else start_attempt)(operator, start)
    return resumed_of(
        first.run, beat, source.step, source.checkpoint, planned.differences,
        damaged=source.damaged, moved_from=planned.moved_from,
    )  # fmt: skip


def begin_on_pods(operator: Operator, planned: FleetResumePlan) -> None:
    """Make everything but the start; what was done before a cut is left alone."""
    source, first, record = planned.source, planned.members[0], planned.record
    for run in planned.runs:
        ship_to(operator, run.link, planned.snapshots[run.pod])
    for run in source.aside:
        asked = SetAsideAction(run_dir=Path(run.run_dir))
        operator.tell(ask(replace(run, code_id=first.run.code_id), asked).message)
    if source.restore is not None:
        restore_to_pod(first.run.link, source.restore, operator.tell)
    if not planned.is_begun:
        run_dir, old = Path(first.run.run_dir), source.old
        begin = next_attempt_action(run_dir, old.attempt, old, first.manifest)
        operator.tell(ask(first.run, begin).message)
    written = read_run_manifest(first.run.link, record.run_id)
    register(operator, holding(record, first.run.link, written), planned.runs)
    join_all(planned.members, written)
