"""Resume: the next attempt of a run, from its newest whole checkpoint or a named one."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nsa_core.config.compare import ChangedValue, differing_values
from nsa_core.config.recipe import config_sha256
from nsa_core.config.run import RunConfig
from nsa_core.rundir.checkpoint import CheckpointState
from nsa_core.rundir.manifest import AFRESH, AUTO, RunManifest
from nsa_core.rundir.report import Report
from nsa_ops.agents import ask, read_run_manifest, verify
from nsa_ops.configure import ChangedConfig, RunChoice, load_hardware, overlay
from nsa_ops.context import Operator, PodLink, RunHandle
from nsa_ops.errors import ConfigurationError, NotFoundError, StateConflictError
from nsa_ops.estimate import settle_sharding
from nsa_ops.machine.hardware import read_cards
from nsa_ops.machine.host import HostFacts, PythonFacts, read_host
from nsa_ops.plan import Plan, Step, plan_of
from nsa_ops.pod.messages import NextAttemptAction
from nsa_ops.preflight.guardrails import PREFLIGHT, require_several_cards
from nsa_ops.preflight.preflight import PodFacts, offered_cards, subject_of
from nsa_ops.preflight.proof import refuse_marked, require_summed
from nsa_ops.preflight.several_cards import num_cards, takes_several
from nsa_ops.remote.snapshot import take_snapshot
from nsa_ops.runs.attempt import AttemptStart, FirstBeat, start_attempt
from nsa_ops.runs.checkpoints import (
    MORE_STEPS,
    refuse_foreign,
    refuse_full_disk,
    refuse_other_model,
    refuse_trained,
    require_checkpoint,
)
from nsa_ops.runs.choose import RESUMABLE, FoundRun, find_run
from nsa_ops.runs.lease import (
    OLD_POD,
    Takeover,
    last_reason,
    other_lineage_notes,
    require_unmoved,
    unsettled_notes,
)
from nsa_ops.runs.windows import TRAINER_MODULE, require_tmux, start_step
from nsa_ops.store import PodRecord, RunRecord


@dataclass(frozen=True)
class ResumePlan:
    """A resume that may be done.

    Attributes:
        old: Manifest of the attempt that ended.
        new: The same as it will be, apart from what the pod gives a new attempt.
        checkpoint: Where it continues; None starts again from the first step.
        damaged: Newer checkpoints that are passed over, each in one line.
        is_begun: The attempt was begun before and never started, as after a cut: it only starts.
    """

    found: FoundRun
    old: RunManifest
    new: RunManifest
    checkpoint: CheckpointState | None
    damaged: list[str]
    notes: list[str]
    trainer_module: str
    is_begun: bool = False

    @property
    def differences(self) -> list[ChangedValue]:
        """Values of the configuration that the new attempt does not share with the one before."""
        return differing_values(self.old.config, self.new.config)

    @property
    def plan(self) -> Plan:
        """The same for people."""
        report, step = self.found.report, self.checkpoint and self.checkpoint.step
        attempt, is_afresh = report.manifest.attempt, self.new.resume == AFRESH
        why = "its checkpoints are set aside" if is_afresh else "it has no checkpoint"
        where = f"from the first step: {why}" if step is None else f"from step {step}"
        next_attempt = Step(
            "next attempt",
            f"attempt {attempt} was never started"
            if self.is_begun
            else f"keep attempt {attempt} under attempts/{attempt}, begin {attempt + 1} {where}",
            files=(f"{report.run_dir}/manifest.json",),
            is_done=self.is_begun,
        )
        notes = [f"passed over a damaged checkpoint: {line}" for line in self.damaged]
        return plan_of(
            f"Resume {report.run_id} {where}",
            [next_attempt, start_step(self.found.run, self.trainer_module)],
            [*self.notes, *notes, *(f"differs: {one}" for one in self.differences)],
        )


@dataclass(frozen=True)
class Resumed:
    """A run that continues.

    Attributes:
        from_step: Step it continues from; 0 without a checkpoint.
        checkpoint: Folder it continues from; empty without one.
        damaged: Newer checkpoints that were passed over, each in one line.
        moved_from: Pod that it was on before; empty if it stayed.
        pods: All its pods by node rank, if it has several.
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
    pods: tuple[str, ...] = ()


def plan_resume(
    operator: Operator,
    run_id: str | None,
    *,
    path: str = "",
    afresh: bool = False,
    sets: tuple[str, ...] = (),
    trainer_module: str = "",
) -> ResumePlan:
    """Find the run, hash the checkpoint it continues from, and say what will differ.

    Args:
        operator: Who asks.
        run_id: Run; None where only one can be resumed.
        path: Folder of the checkpoint on the pod; empty for the newest whole one.
        afresh: Begin at the first step, whatever checkpoints there are.
        sets: Values to change, as `--set` takes them.
        trainer_module: Python module that trains; empty for the one that did before.

    Raises:
        StateConflictError: If it runs, or finished.
        LocalResourceError: If the pod lacks what a run is started with, or room for a checkpoint.
        NotFoundError: If there is no checkpoint to continue from.
        VerificationError: If the named checkpoint is damaged, or of another run.
        ConfigurationError: If the values cannot go together, or with the weights, or if no step is
            left to train.
    """
    found = find_run(operator, run_id, among=RESUMABLE)
    pod = found.link.record
    require_ended(found, changes_something=bool(sets or path or afresh))
    host = read_host(found.link.transport, pod.python, pod.root)
    require_tmux(found.link, host)
    refuse_marked(found.link, {})
    manifest = read_run_manifest(found.link, found.record.run_id)
    processes = found.report.processes
    module = trainer_module or (processes.module if processes else TRAINER_MODULE)
    checkpoint, damaged = (None, []) if afresh else choose_checkpoint(found, path)
    if checkpoint is not None:
        refuse_foreign(checkpoint, manifest)
    changed = changed_config(operator, found.link, host, manifest, sets)
    config = changed.config
    if checkpoint is not None:
        refuse_other_model(checkpoint.path, config, found.link)
        may_only_end = found.report.state != "finished"
        refuse_trained(checkpoint.step, config, may_only_end=may_only_end)
    _require_one_pod(config, found.record)
    refuse_full_disk(found.run, found.report.disk_free_bytes, config, manifest.overrides)
    start_at = checkpoint.path if path and checkpoint else AUTO
    new = {"resume": AFRESH if afresh else start_at, "pod_id": pod.pod_id}
    return ResumePlan(
        found=found,
        old=manifest,
        new=_taken(operator, with_config(manifest, config), pod).model_copy(update=new),
        checkpoint=checkpoint,
        damaged=damaged,
        notes=[
            *other_lineage_notes(found.record, found.report.manifest),
            *unsettled_notes(operator.store, found.record.run_id),
            *changed.notes,
        ],
        trainer_module=module,
        is_begun=found.report.state == "planned"
        and not (path or afresh or config != manifest.config),
    )


def _require_one_pod(config: RunConfig, record: RunRecord) -> None:
    if config.runtime.num_pods > 1:
        message = f"Run `{record.run_id}` is of {config.runtime.num_pods} pods, and one is known"
        hint = f"Name all of them, pod 0 first: `nsa-ops resume {record.run_id} --pods A,B`"
        raise ConfigurationError(message, hint=hint)


def changed_config(
    operator: Operator,
    link: PodLink,
    host: HostFacts,
    manifest: RunManifest,
    sets: tuple[str, ...],
) -> ChangedConfig:
    """The configuration of the next attempt, on cards that the pod has.

    Raises:
        ConfigurationError: If the values cannot go together.
        RefusedError: If it takes several cards that the pod lacks, or that no preflight summed
            over; a run on one card asks for none of that.
    """
    asked = overlay(manifest.config, sets)
    if not takes_several(asked.config):
        return settled(asked, None)
    hardware = load_hardware(manifest.profile)
    facts = PodFacts(host, PythonFacts(), read_cards(link.transport))
    changed = settled(
        overlay(manifest.config, sets, hardware, offered_cards(hardware, facts)),
        facts.card_memory_gib,
    )
    overrides, config = manifest.overrides, changed.config
    require_several_cards(subject_of(config, hardware, facts), overrides)
    if PREFLIGHT not in overrides and num_cards(config) > num_cards(manifest.config):
        choice = RunChoice(config.recipe, hardware.name, sets)
        require_summed(link.record.name, choice, config, _newest_report(operator, link, manifest))
    return changed


def settled(changed: ChangedConfig, memory_gib: float | None) -> ChangedConfig:
    """The same, where several ranks know how they keep the state of the run."""
    config, notes = settle_sharding(changed.config, memory_gib)
    return ChangedConfig(config, [*changed.notes, *notes])


def _newest_report(operator: Operator, link: PodLink, manifest: RunManifest) -> Report | None:
    """A preflight of the pod with the run's code, or with that of this checkout.

    What the cards sum does not depend on our code, and only this checkout's can be tried anew.
    """
    for code_id in (manifest.code_id, take_snapshot().code_id):
        found = operator.store.newest_report(link.record.pod_id, code_id, manifest.profile)
        if found is not None:
            return found[1]
    return None


def require_ended(found: FoundRun, *, changes_something: bool) -> None:
    """Refuse a run that runs, or one that finished and would do nothing more."""
    report = found.report
    if report.state not in RESUMABLE and report.state != "finished":
        message = f"Run `{report.run_id}` is {report.state}: {report.why}"
        hint = f"Stop it first with `nsa-ops halt {report.run_id}`"
        raise StateConflictError(message, hint=hint)
    if report.state == "finished" and not changes_something:
        message = f"Run `{report.run_id}` finished: {report.why}"
        raise StateConflictError(message, hint=MORE_STEPS)


def choose_checkpoint(found: FoundRun, path: str) -> tuple[CheckpointState | None, list[str]]:
    """The checkpoint to continue from and the damaged ones that are passed over."""
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


def with_config(manifest: RunManifest, config: RunConfig) -> RunManifest:
    """A manifest with another configuration; the same where no value differs."""
    differences = differing_values(manifest.config, config)
    if not differences:
        return manifest
    values = {
        "config": config,
        "config_sha256": config_sha256(config),
        "kernels": {},  # proven for the configuration before
        "origins": manifest.origins | {one.key: "resume --set" for one in differences},
    }
    return manifest.model_copy(update=values)


def next_attempt_action(
    run_dir: Path, from_attempt: int, old: RunManifest, new: RunManifest
) -> NextAttemptAction:
    """What the agent on the pod is asked to change, field by field; it numbers the attempt."""
    fixed = {"attempt", "created_unix_s"}
    checked = RunManifest.model_validate(new.model_dump())  # redacts what people typed
    now, before = checked.model_dump(mode="json"), old.model_dump(mode="json")
    changes = {key: now[key] for key in now if key not in fixed and now[key] != before[key]}
    return NextAttemptAction(run_dir=run_dir, from_attempt=from_attempt, changes=changes)


def _taken(operator: Operator, manifest: RunManifest, pod: PodRecord) -> RunManifest:
    """The manifest of a run that was restored to this pod says why it was taken from another."""
    reason = last_reason(operator.store, manifest.run_id)
    if manifest.pod_id == pod.pod_id or not reason:
        return manifest
    return manifest.model_copy(update={"overrides": {**manifest.overrides, OLD_POD: reason}})


def execute_resume(operator: Operator, planned: ResumePlan) -> Resumed:
    """Begin the next attempt and wait until it is up."""
    found, run = planned.found, planned.found.run
    attempt = found.report.manifest.attempt

    def begin() -> None:
        if not planned.is_begun:
            run_dir = Path(found.report.run_dir)
            action = next_attempt_action(run_dir, attempt, planned.old, planned.new)
            operator.tell(ask(run, action).message)

    start = AttemptStart(
        act="resume",
        runs=(run,),
        module=planned.trainer_module,
        take=lambda: [require_unmoved(operator, Takeover(found.record))],
        begin=begin,
        known=found.record,
        detail={"from_attempt": attempt - 1 if planned.is_begun else attempt},
    )
    whole = planned.checkpoint
    step, path = (whole.step, whole.path) if whole else (0, "")
    beat = start_attempt(operator, start)
    return resumed_of(run, beat, step, path, planned.differences, damaged=planned.damaged)


def resumed_of(
    run: RunHandle,
    beat: FirstBeat,
    step: int,
    checkpoint: str,
    differences: list[ChangedValue],
    *,
    damaged: Sequence[str] = (),
    moved_from: str = "",
) -> Resumed:
    """What a resume came to, here or on other pods."""
    report = beat.report
    return Resumed(
        run_id=run.run_id,
        attempt=report.manifest.attempt,
        from_step=step,
        checkpoint=checkpoint,
        damaged=list(damaged),
        differences=differences,
        state=report.state,
        why=report.why,
        first_beat_after_s=beat.after_s or 0.0,
        pod=run.pod,
        moved_from=moved_from,
        pods=tuple(one.pod for one in report.pods),
    )
