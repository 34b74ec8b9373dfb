"""Resume on another pod: the run continues there from its newest verified backup."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa_core.config.recipe import list_recipes
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import AUTO, Parent, RunManifest
from nsa_ops.agents import ask, probe_run
from nsa_ops.backup.folder import BackupFolder
from nsa_ops.backup.receipts import newest_held, receipts_of
from nsa_ops.backup.restore import RestorePlan, plan_restore, restore_to_pod
from nsa_ops.configure import RunChoice, load_hardware, overlay, require_profile
from nsa_ops.context import Operator, PodLink, RunHandle
from nsa_ops.errors import NotFoundError, StateConflictError
from nsa_ops.plan import Plan, Step, plan_of
from nsa_ops.pod.messages import NextAttemptAction, RunReport
from nsa_ops.pods.known import choose_pod
from nsa_ops.preflight.guardrails import require_guardrails
from nsa_ops.preflight.preflight import offered_cards, subject_of
from nsa_ops.preflight.proof import find_proof, note_another_probed
from nsa_ops.remote.snapshot import Snapshot, has_code, take_snapshot
from nsa_ops.remote.transport import QUICK_S
from nsa_ops.runs.adopt import read_backed_up
from nsa_ops.runs.attempt import AttemptStart, ship_to, start_attempt
from nsa_ops.runs.choose import LIVE, choose_record
from nsa_ops.runs.launch import read_startable_pod, require_data
from nsa_ops.runs.lease import (
    OLD_POD,
    OldPod,
    Takeover,
    allow_leaving,
    look_at_old_pod,
    require_unmoved,
)
from nsa_ops.runs.resume import (
    ChangedValue,
    Resumed,
    differing_values,
    next_attempt_action,
    resumed_of,
    settled,
    with_config,
)
from nsa_ops.runs.windows import TRAINER_MODULE, list_windows, start_step
from nsa_ops.store import RunRecord

#: Fields of the manifest whose change an operator wants to read, in this order.
_SHOWN = ("pod_id", "profile", "code_id", "code_commit", "dirty_sha256", "lock_sha256")


@dataclass(frozen=True)
class MoveRequest:
    """What the operator asked for."""

    run_id: str | None
    pod: str
    sets: tuple[str, ...] = ()
    overrides: Mapping[str, str] | None = None
    trainer_module: str = ""


@dataclass(frozen=True)
class MovePlan:
    """A move that may be done; what was done before a cut is left out.

    Attributes:
        snapshot: Code to ship; None where the pod has the run's own code.
        restore: What to copy there; None if it is there.
        next_attempt: The attempt to begin; None if it was begun.
        manifest: What the manifest will be, apart from its time.
    """

    run: RunRecord
    old: OldPod
    link: PodLink
    snapshot: Snapshot | None
    restore: RestorePlan | None
    next_attempt: NextAttemptAction | None
    manifest: RunManifest
    step: int
    differences: list[ChangedValue]
    notes: list[str]
    trainer_module: str

    @property
    def target(self) -> RunHandle:
        """The run as it will be on the new pod."""
        return RunHandle(self.link, self.manifest.code_id, self.run.run_id)

    @property
    def plan(self) -> Plan:
        """The same for people."""
        run, restore, new = self.target, self.restore, self.manifest
        run_dir, code = run.run_dir, str(run.link.code(new.code_id))
        copied = restore.plan.steps[0].detail if restore else f"`{run_dir}` is there already"
        steps = [
            Step("ship code", new.code_id, files=(code,), is_done=self.snapshot is None),
            Step("restore", copied, files=(str(run_dir),), is_done=restore is None),
            Step(
                "next attempt",
                f"begin attempt {new.attempt}, parent step {self.step}",
                files=(f"{run_dir}/manifest.json",),
                is_done=self.next_attempt is None,
            ),
            start_step(run, self.trainer_module),
        ]
        notes = [*self.notes, *(restore.plan.notes if restore else ())]
        notes += [one.note for one in self.differences]
        where = f"on pod {run.pod} from step {self.step}, not on {self.run.pod}"
        return plan_of(f"Resume {run.run_id} {where}", steps, notes)


def is_elsewhere(operator: Operator, run_id: str | None, pod: str) -> bool:
    """Whether a run would have to be moved to continue on this pod."""
    return choose_record(operator, run_id).pod != choose_pod(operator.store, pod).name


def plan_move(operator: Operator, request: MoveRequest) -> MovePlan:
    """Verify the backup, look at both pods, and refuse here what can be refused.

    Raises:
        NotFoundError: If nothing of the run is backed up.
        StateConflictError: If the run still runs on its old pod, or on the new one.
        RefusedError: If the old pod has more than the backup, a guardrail or the preflight of the
            new pod forbids it.
        VerificationError: If the backup is damaged.
    """
    overrides = dict(request.overrides or {})
    run = choose_record(operator, request.run_id)
    link = operator.link(choose_pod(operator.store, request.pod))
    folder = newest_backup(operator, run.run_id)
    old = read_backed_up(folder)
    code = choose_code(link, old)
    target = RunHandle(link, code.code_id if code else old.code_id, run.run_id)
    list_windows(target)  # refused here if a run of this id in another directory has it
    there = _look_there(target)
    receipts = operator.store.receipts()
    restore = (
        plan_restore(folder, link.runs, link=link, receipts=receipts, newest_only=True)
        if there is None
        else None
    )
    facts = there.checkpoints if there else []
    step = restore.step if restore else max((one.step for one in facts if one.whole), default=0)
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
        next_attempt=None
        if is_begun
        else next_attempt_action(Path(target.run_dir), old.attempt, old, new),
        manifest=new,
        step=step,
        differences=differences_of(old, new),
        notes=notes,
        trainer_module=request.trainer_module or TRAINER_MODULE,
    )


def newest_backup(operator: Operator, run_id: str) -> BackupFolder:
    """The backup that holds the newest checkpoint whose receipt is still valid."""
    run, receipts = operator.store.find_run(run_id), operator.store.receipts(run_id)
    if run is not None:  # a backup of another lineage of this run id is no backup of it
        receipts = receipts_of(receipts, run.attempt, run.attempt_id)
    receipt = newest_held(receipts)
    if receipt is None:
        message = f"Nothing of `{run_id}` is backed up here, so it cannot continue on another pod"
        hint = f"Only its own pod can: `nsa-ops resume {run_id}`, or `nsa-ops backup pull {run_id}`"
        raise NotFoundError(message, hint=hint)
    # A receipt names checkpoints/step_N inside the backup.
    return BackupFolder(Path(receipt.path).parents[1])


def choose_code(link: PodLink, manifest: RunManifest) -> Snapshot | None:
    """The code of this checkout, unless the pod has the code that the run was made with."""
    if has_code(link.transport, link.record.python, link.code(manifest.code_id)):
        return None
    return take_snapshot()


def _look_there(run: RunHandle) -> RunReport | None:
    """The run on the new pod, where a cut move may have left it; None if it is not there."""
    link, run_dir = run.link, str(run.run_dir)
    if link.transport.run(("test", "-e", run_dir), timeout_s=QUICK_S).exit_code != 0:
        return None
    if not has_code(link.transport, link.record.python, link.code(run.code_id)):
        message = f"`{run_dir}` exists on pod `{run.pod}`, and no code to look at it"
        hint = "Move that directory away there, then repeat it"
        raise StateConflictError(message, hint=hint)
    report = probe_run(run)
    begun_here = report.manifest.pod_id == link.record.pod_id
    if begun_here and report.state != "planned":
        is_live = report.state in LIVE
        message = f"Run `{run.run_id}` is {report.state} on pod `{run.pod}`: {report.why}"
        hint = (
            "Let the registry know of it with `nsa-ops reconcile`"
            if is_live
            else f"`{run_dir}` is from an earlier time there: move it away, then repeat this"
        )
        raise StateConflictError(message, hint=hint)
    return report


def execute_move(operator: Operator, planned: MovePlan) -> Resumed:
    """Restore, begin the next attempt, start it; the registry names the new pod from then on."""
    run, manifest = planned.target, planned.manifest

    def begin() -> None:
        ship_to(operator, run.link, planned.snapshot)
        if planned.restore is not None:
            restore_to_pod(run.link, planned.restore, operator.tell)
        if planned.next_attempt is not None:
            operator.tell(ask(run, planned.next_attempt).message)

    start = AttemptStart(
        act="resume",
        runs=(run,),
        module=planned.trainer_module,
        take=lambda: [require_unmoved(operator, Takeover(planned.run, planned.old))],
        begin=begin,
        known=planned.run,
        detail={"from_attempt": manifest.attempt - 1},
        overrides=manifest.overrides,
    )
    beat = start_attempt(operator, start)
    checkpoint = str(RunDir(Path(beat.report.run_dir)).checkpoint(planned.step))
    return resumed_of(
        run, beat, planned.step, checkpoint, planned.differences, moved_from=planned.run.pod
    )


def next_manifest(
    operator: Operator,
    link: PodLink,
    old: RunManifest,
    code: Snapshot | None,
    *,
    step: int,
    sets: Sequence[str],
    overrides: Mapping[str, str],
) -> RunManifest:
    """The manifest of the next attempt, once nothing on the new pod forbids it."""
    pod = link.record
    profile = require_profile(operator, RunChoice(), pod.profile or old.profile)
    hardware = load_hardware(profile)
    facts = read_startable_pod(link, hardware, overrides)
    offered = offered_cards(hardware, facts)
    changed = settled(overlay(old.config, sets, hardware, offered), facts.card_memory_gib)
    for note in changed.notes:
        operator.tell(f"pod {pod.name}: {note}")
    config = changed.config
    require_guardrails(subject_of(config, hardware, facts), {**old.overrides, **overrides})
    require_data(link, config.data)
    code_id = code.code_id if code else old.code_id
    recipe = config.recipe if config.recipe in list_recipes() else ""  # a file is not on this disk
    choice = RunChoice(recipe, hardware.name, tuple(sets))
    proof = find_proof(operator, link, code_id, choice, config, overrides)
    values: dict[str, Any] = {
        "attempt": old.attempt + 1,
        "parent": Parent(run_id=old.run_id, step=step),
        "pod_id": pod.pod_id,
        "pod_facts": proof.pod_facts,
        "profile": hardware.name,
        "preflight_sha256": proof.sha256,
        "overrides": {**old.overrides, **overrides},
        "resume": AUTO,
        "command": sys.argv,
        "kernels": proof.kernels,
        **_code_fields(code),
    }
    return with_config(old, config).model_copy(update=values)


def _code_fields(code: Snapshot | None) -> dict[str, str]:
    if code is None:
        return {}
    return {
        "code_id": code.code_id,
        "code_commit": code.commit,
        "dirty_sha256": code.dirty_sha256,
        "lock_sha256": code.lock_sha256,
    }


def differences_of(old: RunManifest, new: RunManifest) -> list[ChangedValue]:
    """Pod, code, profile, facts and values that two attempts do not share; pure."""
    fields = [
        ChangedValue(name, getattr(old, name), getattr(new, name))
        for name in _SHOWN
        if getattr(old, name) != getattr(new, name)
    ]
    facts = [
        ChangedValue(f"pod_facts.{name}", old.pod_facts.get(name), new.pod_facts.get(name))
        for name in sorted(old.pod_facts.keys() | new.pod_facts.keys())
        if old.pod_facts.get(name) != new.pod_facts.get(name)
    ]
    return [*fields, *facts, *differing_values(old.config, new.config)]
