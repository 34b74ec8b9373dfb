"""Resume: the next attempt of a run, from its newest whole checkpoint or a named one."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa_core.config.recipe import config_sha256, leaves
from nsa_core.config.run import RunConfig
from nsa_core.rundir.manifest import AFRESH, AUTO, RunManifest
from nsa_ops.agents import ask, read_run_manifest, verify
from nsa_ops.configure import overlay
from nsa_ops.context import Operator
from nsa_ops.errors import NotFoundError, StateConflictError
from nsa_ops.machine.host import read_host
from nsa_ops.plan import Plan, Step, plan_of
from nsa_ops.pod.messages import NextAttemptAction
from nsa_ops.pod.verify import VerifiedCheckpoint
from nsa_ops.preflight.proof import refuse_marked
from nsa_ops.remote.tmux import session_name
from nsa_ops.runs.attempt import AttemptStart, start_attempt
from nsa_ops.runs.checkpoints import refuse_foreign, require_checkpoint
from nsa_ops.runs.choose import RESUMABLE, FoundRun, find_run
from nsa_ops.runs.lease import (
    OLD_POD,
    Takeover,
    last_reason,
    other_lineage_notes,
    require_unmoved,
    unsettled_notes,
)
from nsa_ops.runs.windows import TRAINER_MODULE, require_tmux, train_command


@dataclass(frozen=True)
class ChangedValue:
    """A value that the new attempt does not share with the one before."""

    key: str
    before: Any
    now: Any


@dataclass(frozen=True)
class ResumePlan:
    """A resume that may be done.

    Attributes:
        found: The run.
        checkpoint: Where it goes on; None starts again from the first step.
        damaged: Newer checkpoints that are passed over, each in one line.
        differences: What the new attempt does not share with the one before.
        changes: Fields of the manifest that change.
        plan: What will be done.
        trainer_module: Python module that trains.
        is_begun: The attempt was begun before and never started, as after a cut: it only starts.
    """

    found: FoundRun
    checkpoint: VerifiedCheckpoint | None
    damaged: list[str]
    differences: list[ChangedValue]
    changes: dict[str, Any]
    plan: Plan
    trainer_module: str
    is_begun: bool = False


@dataclass(frozen=True)
class Resumed:
    """A run that goes on.

    Attributes:
        run_id: Its id.
        attempt: The new attempt.
        from_step: Step it goes on from; 0 without a checkpoint.
        checkpoint: Folder it goes on from; empty without one.
        damaged: Newer checkpoints that were passed over, each in one line.
        differences: What the new attempt does not share with the one before.
        state: State when it was last looked at.
        why: The evidence for it.
        first_beat_after_s: Seconds from the start to the first heartbeat.
        pod: Pod that it runs on.
        moved_from: Pod that it was on before; empty if it stayed.
    """

    run_id: str
    attempt: int
    from_step: int
    checkpoint: str
    damaged: list[str]
    differences: list[ChangedValue]
    state: str
    why: str
    first_beat_after_s: float
    pod: str = ""
    moved_from: str = ""


def plan_resume(
    operator: Operator,
    run_id: str | None,
    *,
    path: str = "",
    afresh: bool = False,
    sets: tuple[str, ...] = (),
    trainer_module: str = "",
) -> ResumePlan:
    """Find the run, hash the checkpoint it goes on from, and say what will differ.

    Args:
        operator: Who asks.
        run_id: Run; None where only one can be resumed.
        path: Folder of the checkpoint on the pod; empty for the newest whole one.
        afresh: Begin at the first step, whatever checkpoints there are.
        sets: Values to change, as `--set` takes them.
        trainer_module: Python module that trains; empty for the one that did before.

    Raises:
        StateConflictError: If it runs, or finished.
        LocalResourceError: If the pod lacks what a run is started with.
        NotFoundError: If there is no checkpoint to go on from.
        VerificationError: If the named checkpoint is damaged, or of another run.
    """
    found = find_run(operator, run_id, among=RESUMABLE)
    pod = found.link.record
    _require_ended(found, changes_something=bool(sets))
    require_tmux(found.link, read_host(found.link.transport, pod.python, pod.root))
    refuse_marked(found.link, {})
    manifest = read_run_manifest(found.link, found.record.run_id)
    processes = found.report.processes
    module = trainer_module or (processes.module if processes else TRAINER_MODULE)
    checkpoint, damaged = (None, []) if afresh else _choose_checkpoint(found, path)
    if checkpoint is not None:
        refuse_foreign(checkpoint, manifest)
    config = overlay(manifest.config, sets)
    differences = differing_values(manifest.config, config)
    is_begun = found.report.state == "planned" and not (path or afresh or differences)
    changes: dict[str, Any] = {"resume": checkpoint.path if path and checkpoint else AUTO}
    changes |= {"resume": AFRESH} if afresh else {}
    changes |= changed_config(manifest, config, differences)
    changes |= _taken(operator, found, manifest)
    return ResumePlan(
        found=found,
        checkpoint=checkpoint,
        damaged=damaged,
        differences=differences,
        changes=changes,
        plan=_plan(
            found,
            checkpoint,
            [
                *other_lineage_notes(found.record, found.report.manifest),
                *unsettled_notes(operator.store, found.record.run_id),
                *_notes(damaged, differences),
            ],
            module,
            is_begun=is_begun,
            is_afresh=afresh,
        ),
        is_begun=is_begun,
        trainer_module=module,
    )


def _require_ended(found: FoundRun, *, changes_something: bool) -> None:
    report = found.report
    if report.state not in RESUMABLE and report.state != "finished":
        message = f"Run `{report.run_id}` is {report.state}: {report.why}"
        hint = f"Stop it first with `nsa-ops halt {report.run_id}`"
        raise StateConflictError(message, hint=hint)
    if report.state == "finished" and not changes_something:
        message = f"Run `{report.run_id}` finished: {report.why}"
        hint = "To train on, give it more steps: `--set schedule.steps=N`"
        raise StateConflictError(message, hint=hint)


def _choose_checkpoint(found: FoundRun, path: str) -> tuple[VerifiedCheckpoint | None, list[str]]:
    """The checkpoint to go on from and the damaged ones that are passed over."""
    if path:
        return require_checkpoint(found.run, path), []
    verification = verify(found.run)
    if verification.whole is None and verification.checkpoints:
        damaged = "; ".join(verification.damaged)
        message = f"No checkpoint of `{found.record.run_id}` is whole: {damaged}"
        hint = "Restore one with `nsa-ops backup restore`, or name one with `--from PATH`"
        raise NotFoundError(message, hint=hint)
    ended = found.report.exit
    if not verification.checkpoints and ended is not None and ended.checkpoint_step:
        message = (
            f"`{found.record.run_id}` ended with a checkpoint of step {ended.checkpoint_step}, and "
            "its folder of checkpoints holds none"
        )
        begin = f"`nsa-ops resume {found.record.run_id} --afresh`"
        hint = f"Restore one with `nsa-ops backup restore`, or begin at the first step: {begin}"
        raise NotFoundError(message, hint=hint)
    return verification.whole, verification.damaged


def changed_config(
    manifest: RunManifest, config: RunConfig, differences: Sequence[ChangedValue]
) -> dict[str, Any]:
    """Fields of the manifest that carry another configuration; none if nothing differs."""
    if not differences:
        return {}
    return {
        "config": config.model_dump(mode="json"),
        "config_sha256": config_sha256(config),
        "kernels": {},  # proven for the configuration before
        "origins": manifest.origins | {one.key: "resume --set" for one in differences},
    }


def differing_values(before: RunConfig, now: RunConfig) -> list[ChangedValue]:
    """Values of the configuration that two attempts do not share."""
    old, new = leaves(before), leaves(now)
    return [ChangedValue(key, old[key], new[key]) for key in old if old[key] != new[key]]


def _plan(
    found: FoundRun,
    checkpoint: VerifiedCheckpoint | None,
    notes: list[str],
    module: str,
    *,
    is_begun: bool,
    is_afresh: bool,
) -> Plan:
    report, run_id = found.report, found.record.run_id
    attempt = report.manifest.attempt
    why = "its checkpoints are set aside" if is_afresh else "it has no checkpoint"
    where = f"from step {checkpoint.step}" if checkpoint else f"from the first step: {why}"
    steps = [
        Step(
            "next attempt",
            f"attempt {attempt} was never started"
            if is_begun
            else f"keep attempt {attempt} under attempts/{attempt}, begin {attempt + 1} {where}",
            files=(f"{report.run_dir}/manifest.json",),
            is_done=is_begun,
        ),
        Step(
            "start training",
            f"tmux session {session_name(run_id)}, windows train and watchdog",
            command=train_command(found.run, module),
        ),
    ]
    return plan_of(f"Resume {run_id} {where}", steps, notes)


def _notes(damaged: list[str], differences: list[ChangedValue]) -> list[str]:
    notes = [f"passed over a damaged checkpoint: {line}" for line in damaged]
    return notes + [f"differs: {one.key} {one.before} -> {one.now}" for one in differences]


def _taken(operator: Operator, found: FoundRun, manifest: RunManifest) -> dict[str, Any]:
    """What the manifest of a run that was restored here must say: its pod, and on what ground."""
    pod_id = found.link.record.pod_id
    if manifest.pod_id == pod_id:
        return {}
    reason = last_reason(operator.store, manifest.run_id)
    overrides = {"overrides": {**manifest.overrides, OLD_POD: reason}} if reason else {}
    return {"pod_id": pod_id, **overrides}


def execute_resume(operator: Operator, planned: ResumePlan) -> Resumed:
    """Begin the next attempt and wait until it is up.

    Raises:
        StateConflictError: If something of the run is still alive, or another command starts or
            moves it, or did since the plan was made.
        OpsError: If the attempt does not come up.
    """
    found, run = planned.found, planned.found.run
    attempt = found.report.manifest.attempt

    def begin() -> None:
        if not planned.is_begun:
            action = NextAttemptAction(
                run_dir=Path(found.report.run_dir), from_attempt=attempt, changes=planned.changes
            )
            operator.tell(ask(run, action).message)

    start = AttemptStart(
        act="resume",
        run=run,
        module=planned.trainer_module,
        take=lambda: require_unmoved(operator, Takeover(found.record)),
        begin=begin,
        known=found.record,
        detail={"from_attempt": attempt - 1 if planned.is_begun else attempt},
    )
    beat = start_attempt(operator, start)
    return Resumed(
        run_id=run.run_id,
        attempt=beat.report.manifest.attempt,
        from_step=planned.checkpoint.step if planned.checkpoint else 0,
        checkpoint=planned.checkpoint.path if planned.checkpoint else "",
        damaged=planned.damaged,
        differences=planned.differences,
        state=beat.report.state,
        why=beat.report.why,
        first_beat_after_s=beat.after_s or 0.0,
        pod=run.pod,
    )
