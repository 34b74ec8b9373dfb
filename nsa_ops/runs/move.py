"""Resume on another pod: the run goes on there from its newest verified backup."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import ManifestError, RunManifest, read_manifest
from nsa_ops.agents import ask, probe_run
from nsa_ops.backup.folder import BackupFolder
from nsa_ops.backup.lineage import receipts_of
from nsa_ops.backup.receipts import newest_held
from nsa_ops.backup.restore import RestorePlan, plan_restore, restore_to_pod
from nsa_ops.context import Operator, PodLink
from nsa_ops.errors import NotFoundError, StateConflictError, VerificationError
from nsa_ops.plan import Plan, Step, plan_of
from nsa_ops.pod.messages import NextAttemptAction, RunReport
from nsa_ops.pods.pods import choose_pod
from nsa_ops.preflight.probed import note_another_probed
from nsa_ops.remote.snapshot import Snapshot, has_code, ship, take_snapshot
from nsa_ops.remote.tmux import session_name
from nsa_ops.remote.transport import QUICK_S
from nsa_ops.runs.choose import LIVE, choose_record
from nsa_ops.runs.lease import holding, lease_held, note_left, require_unmoved
from nsa_ops.runs.moved_manifest import action_of, differences_of, next_manifest
from nsa_ops.runs.old_pod import OLD_POD, OldPod, allow_leaving, look_at_old_pod
from nsa_ops.runs.resume import Difference, Resumed
from nsa_ops.runs.session import TRAINER_MODULE, list_windows, start_session, train_command
from nsa_ops.runs.wait import FirstBeat, await_first_beat
from nsa_ops.store import RunRecord


@dataclass(frozen=True)
class MoveRequest:
    """What the operator asked for.

    Attributes:
        run_id: Run; None where only one is known.
        pod: Pod that it is to go on on.
        sets: Values to change, as `--set` takes them.
        overrides: Guardrails that may be passed, with the reason.
        trainer_module: Python module that trains; empty for the usual one.
    """

    run_id: str | None
    pod: str
    sets: tuple[str, ...] = ()
    overrides: Mapping[str, str] | None = None
    trainer_module: str = ""


@dataclass(frozen=True)
class MovePlan:
    """A move that may be done; what was done before a cut is left out.

    Attributes:
        run: The run as the registry knows it.
        old: What its pod shows.
        link: Pod that it goes to.
        snapshot: Code to ship; None where the pod has the run's own code.
        restore: What to copy there; None if it is there.
        next_attempt: The attempt to begin; None if it was begun.
        manifest: What the manifest will be, apart from its time.
        step: Step that it goes on from.
        differences: What the new attempt does not share with the one before.
        notes: What the operator should know before saying yes.
        trainer_module: Python module that trains.
    """

    run: RunRecord
    old: OldPod
    link: PodLink
    snapshot: Snapshot | None
    restore: RestorePlan | None
    next_attempt: NextAttemptAction | None
    manifest: RunManifest
    step: int
    differences: list[Difference]
    notes: list[str]
    trainer_module: str

    @property
    def plan(self) -> Plan:
        """The same for people."""
        return _describe(self)


def is_elsewhere(operator: Operator, run_id: str | None, pod: str) -> bool:
    """Whether a run would have to be moved to go on on this pod."""
    return choose_record(operator, run_id).pod != choose_pod(operator.store, pod).name


def plan_move(operator: Operator, request: MoveRequest) -> MovePlan:
    """Verify the backup, look at both pods, and refuse here what can be refused.

    Raises:
        NotFoundError: If nothing of the run is backed up.
        StateConflictError: If the run still runs on its old pod, or on the new one.
        RefusedError: If the old pod has more than the backup, a guardrail or the preflight of the
            new pod stands against it.
        VerificationError: If the backup is damaged.
    """
    overrides = dict(request.overrides or {})
    run = choose_record(operator, request.run_id)
    link = operator.link(choose_pod(operator.store, request.pod))
    folder = newest_backup(operator, run.run_id)
    old = _read_backed_up(folder)
    code = _choose_code(link, old)
    list_windows(link, run.run_id)  # refused here if a run of this id in another directory has it
    there = _look_there(link, code.code_id if code else old.code_id, run.run_id)
    receipts = operator.store.receipts()
    restore = (
        plan_restore(folder, link.runs, link=link, receipts=receipts, newest_only=True)
        if there is None
        else None
    )
    step = restore.step if restore else _newest_step(there)
    left = look_at_old_pod(operator, run)
    more_steps = bool(request.sets)
    notes = allow_leaving(left, run.run_id, step, overrides, more_steps=more_steps)
    if not left.is_proven:  # the manifest says on what ground the run was started elsewhere
        overrides.setdefault(OLD_POD, f"nobody could ask pod {left.pod}: {left.problem}")
    new = next_manifest(
        operator, link, old, code, step=step, sets=request.sets, overrides=overrides
    )
    is_begun = there is not None and there.manifest.pod_id == link.record.pod_id
    proven = operator.store.newest_report(new.pod_id, new.code_id, new.profile)
    notes += note_another_probed(proven and proven[1], new.config)
    return MovePlan(
        run=run,
        old=left,
        link=link,
        snapshot=code,
        restore=restore,
        next_attempt=None if is_begun else action_of(link, old, new),
        manifest=new,
        step=step,
        differences=differences_of(old, new),
        notes=notes,
        trainer_module=request.trainer_module or TRAINER_MODULE,
    )


def newest_backup(operator: Operator, run_id: str) -> BackupFolder:
    """The backup that holds the newest checkpoint whose receipt still stands.

    Raises:
        NotFoundError: If there is none.
    """
    run, receipts = operator.store.find_run(run_id), operator.store.receipts(run_id)
    if run is not None:  # a backup of another lineage of this run id is no backup of it
        receipts = receipts_of(receipts, run.attempt, run.attempt_id)
    receipt = newest_held(receipts)
    if receipt is None:
        message = f"Nothing of `{run_id}` is backed up here, so it cannot go on on another pod"
        hint = f"Only its own pod can: `nsa-ops resume {run_id}`, or `nsa-ops backup pull {run_id}`"
        raise NotFoundError(message, hint=hint)
    # A receipt names checkpoints/step_N inside the backup.
    return BackupFolder(Path(receipt.path).parents[1])


def _read_backed_up(folder: BackupFolder) -> RunManifest:
    try:
        return read_manifest(folder.run)
    except ManifestError as error:
        message = f"The backup `{folder.root}` cannot be used: {error}"
        raise VerificationError(message, hint="Pull it again, or name no other pod") from error


def _choose_code(link: PodLink, manifest: RunManifest) -> Snapshot | None:
    """The code of this checkout, unless the pod has the code that the run was made with."""
    if has_code(link.transport, link.record.python, link.code(manifest.code_id)):
        return None
    return take_snapshot()


def _look_there(link: PodLink, code_id: str, run_id: str) -> RunReport | None:
    """The run on the new pod, where a cut move may have left it; None if it is not there.

    Raises:
        StateConflictError: If it runs there, or stands there from earlier.
    """
    run_dir = str(link.run_dir(run_id))
    if link.transport.run(("test", "-e", run_dir), timeout_s=QUICK_S).exit_code != 0:
        return None
    if not has_code(link.transport, link.record.python, link.code(code_id)):
        message = f"`{run_dir}` exists on pod `{link.record.name}`, and no code to look at it"
        hint = "Move that directory away there, then repeat it"
        raise StateConflictError(message, hint=hint)
    report = probe_run(link, code_id, run_id)
    begun_here = report.manifest.pod_id == link.record.pod_id
    if begun_here and report.state != "planned":
        is_live = report.state in LIVE
        message = f"Run `{run_id}` is {report.state} on pod `{link.record.name}`: {report.why}"
        hint = (
            "Let the registry know of it with `nsa-ops reconcile`"
            if is_live
            else f"`{run_dir}` is from an earlier stay: move it away there, then repeat it"
        )
        raise StateConflictError(message, hint=hint)
    return report


def _newest_step(report: RunReport | None) -> int:
    facts = report.checkpoints if report else []
    return max((fact.step for fact in facts if fact.whole), default=0)


def _describe(planned: MovePlan) -> Plan:
    link, run_id, restore, new = planned.link, planned.run.run_id, planned.restore, planned.manifest
    run_dir, code = link.run_dir(run_id), str(link.code(new.code_id))
    copied = restore.plan.steps[0].detail if restore else f"`{run_dir}` is there already"
    steps = [
        Step("ship code", new.code_id, files=(code,), is_done=planned.snapshot is None),
        Step("restore", copied, files=(str(run_dir),), is_done=restore is None),
        Step(
            "next attempt",
            f"begin attempt {new.attempt}, parent step {planned.step}",
            files=(f"{run_dir}/manifest.json",),
            is_done=planned.next_attempt is None,
        ),
        Step(
            "start training",
            f"tmux session {session_name(run_id)}, windows train and watchdog",
            command=train_command(link, new.code_id, run_id, planned.trainer_module),
        ),
    ]
    told = [*planned.notes, *(restore.plan.notes if restore else ())]
    told += [f"differs: {one.key} {one.before} -> {one.now}" for one in planned.differences]
    where = f"on pod {link.record.name} from step {planned.step}, not on {planned.run.pod}"
    return plan_of(f"Resume {run_id} {where}", steps, told)


def execute_move(operator: Operator, planned: MovePlan) -> Resumed:
    """Restore, begin the next attempt, start it; the registry names the new pod from then on.

    Raises:
        StateConflictError: If another command starts or moves the run, or did since the plan was
            made.
        OpsError: If a step fails; asking again goes on there.
    """
    with lease_held(operator, planned.run.run_id):
        require_unmoved(operator, planned.run)
        return _move(operator, planned)


def _move(operator: Operator, planned: MovePlan) -> Resumed:
    run, link, manifest = planned.run, planned.link, planned.manifest
    run_id, code_id = run.run_id, manifest.code_id
    detail = {
        "pod": link.record.name, "moved_from": run.pod, "from_attempt": manifest.attempt - 1,
        "code_id": code_id, "module": planned.trainer_module,
    }  # fmt: skip
    with operator.store.intent("resume", run_id, **detail):
        if not planned.old.is_proven:
            note_left(operator, run, planned.old, manifest.overrides.get(OLD_POD, ""))
        if planned.snapshot is not None:
            ship(planned.snapshot, link.transport, link.record.python, link.code(code_id))
        if planned.restore is not None:
            restore_to_pod(link, planned.restore, operator.tell)
        if planned.next_attempt is not None:
            operator.tell(ask(link, code_id, planned.next_attempt).message)
        before = probe_run(link, code_id, run_id)
        operator.store.save_run(holding(run, link, before.manifest))
        started_s = operator.clock.monotonic_s()
        start_session(link, code_id, run_id, planned.trainer_module)
        beat = await_first_beat(operator, link, code_id, run_id, started_s, before.log_bytes)
    return _resumed(planned, before, beat)


def _resumed(planned: MovePlan, before: RunReport, beat: FirstBeat) -> Resumed:
    return Resumed(
        run_id=planned.run.run_id,
        attempt=beat.report.manifest.attempt,
        from_step=planned.step,
        checkpoint=f"{RunDir(Path(before.run_dir)).checkpoint(planned.step)}",
        damaged=[],
        differences=planned.differences,
        state=beat.report.state,
        why=beat.report.why,
        first_beat_after_s=beat.after_s,
        pod=planned.link.record.name,
        moved_from=planned.run.pod,
    )
