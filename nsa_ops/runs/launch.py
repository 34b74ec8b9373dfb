"""Launch: resolve, refuse, plan, ship, prepare, start; done when the run is up."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from nsa_core.config.profile import HardwareProfile
from nsa_core.config.recipe import ResolvedConfig
from nsa_core.config.training import DataConfig
from nsa_core.rundir.data_account import DataAccount
from nsa_core.rundir.layout import check_run_id, new_run_id
from nsa_core.rundir.manifest import AUTO, RunManifest, new_attempt_id
from nsa_ops.agents import ask, require_run
from nsa_ops.configure import RunChoice, load_hardware, require_profile
from nsa_ops.context import Operator, PodLink, RunHandle
from nsa_ops.errors import ConfigurationError, NotFoundError
from nsa_ops.estimate import estimate_staging
from nsa_ops.machine.hardware import HardwareFacts, read_cards
from nsa_ops.machine.host import PythonFacts, read_host
from nsa_ops.plan import Plan, Step, plan_of
from nsa_ops.pod.messages import PrepareRunAction
from nsa_ops.pods.known import meant_pod
from nsa_ops.preflight.guardrails import PREFLIGHT, require_guardrails
from nsa_ops.preflight.preflight import (
    PodFacts,
    refusal_of,
    resolve_for,
    run_preflight,
    subject_of,
)
from nsa_ops.preflight.proof import (
    Proof,
    blocking_checks,
    find_proof,
    note_another_probed,
    refuse_marked,
)
from nsa_ops.printable import printable
from nsa_ops.provision.provisioning import execute_provision, plan_provision
from nsa_ops.quantities import count_of
from nsa_ops.remote.snapshot import Snapshot, has_code, take_snapshot
from nsa_ops.remote.tmux import session_name
from nsa_ops.remote.transport import QUICK_S
from nsa_ops.runs.attempt import AttemptStart, FirstBeat, ship_to, start_attempt
from nsa_ops.runs.checkpoints import with_parent, with_parent_as_planned
from nsa_ops.runs.choose import record_of
from nsa_ops.runs.lease import plan_takeover
from nsa_ops.runs.windows import (
    TRAINER_MODULE,
    require_tmux,
    train_command,
    watchdog_command,
)


@dataclass(frozen=True)
class LaunchRequest:
    """What the operator asked for.

    Attributes:
        pod: Pod; None where only one fits.
        run_id: Run id; empty makes a new one.
        resume_from: Folder of a checkpoint on the pod to begin from; empty begins afresh.
    """

    choice: RunChoice
    pod: str | None = None
    run_id: str = ""
    resume_from: str = ""
    overrides: Mapping[str, str] = field(default_factory=dict)
    command: Sequence[str] = ()
    trainer_module: str = TRAINER_MODULE


@dataclass(frozen=True)
class LaunchPlan:
    """A launch that may be done."""

    run: RunHandle
    snapshot: Snapshot
    manifest: RunManifest
    plan: Plan
    trainer_module: str


@dataclass(frozen=True)
class Launched:
    """A run that is there now.

    Attributes:
        is_new: This launch made it; otherwise the same launch was done before.
        first_beat_after_s: Seconds from the start to the first heartbeat; None if it was not new.
        data: What was dropped of its data, and why; None before it was opened.
        pods: All its pods by node rank, if it has several.
    """

    run_id: str
    pod: str
    run_dir: str
    attempt: int
    is_new: bool
    state: str
    why: str
    first_beat_after_s: float | None
    data: DataAccount | None = None
    pods: tuple[str, ...] = ()


def plan_launch(operator: Operator, request: LaunchRequest) -> LaunchPlan:
    """Everything that can be refused is refused here, before anything changes.

    Raises:
        ConfigurationError: If the configuration cannot be used.
        RefusedError: If a guardrail or the preflight forbids it.
        LocalResourceError: If the pod lacks what a run is started with.
        NotFoundError: If the pod, the data or the checkpoint does not exist.
        StateConflictError: If the run is known on another pod, and may run there.
        VerificationError: If the checkpoint is not whole; known only where the pod has the code.
    """
    require_run_id(request.run_id)
    link = operator.link(meant_pod(operator, request.pod))
    known = operator.store.find_run(request.run_id)
    taken = plan_takeover(operator, known, link, request.overrides)
    snapshot = take_snapshot()
    ready = ready_pod(operator, request, link, snapshot)
    manifest = manifest_of(operator, request, ready, snapshot)
    manifest = with_parent_as_planned(link, manifest)
    run = RunHandle(link, snapshot.code_id, manifest.run_id)
    notes = [*taken.notes, *ready.notes]
    plan = _plan(run, snapshot, manifest, request.trainer_module, notes)
    return LaunchPlan(run, snapshot, manifest, plan, request.trainer_module)


@dataclass(frozen=True)
class ReadyPod:
    """A pod on which nothing forbids the run.

    Attributes:
        resolved: The configuration for its very cards.
        notes: What to know before the run is launched there.
    """

    link: PodLink
    resolved: ResolvedConfig
    proof: Proof
    notes: list[str]


def ready_pod(
    operator: Operator, request: LaunchRequest, link: PodLink, snapshot: Snapshot
) -> ReadyPod:
    """Refuse what one pod forbids: tools, guardrails, preflight, data; see `plan_launch`."""
    hardware = load_hardware(require_profile(operator, request.choice, link.record.profile))
    facts = read_startable_pod(link, hardware, request.overrides)
    resolved = resolve_for(operator, request.choice, hardware, facts)
    findings = require_guardrails(subject_of(resolved.config, hardware, facts), request.overrides)
    choice = replace(request.choice, profile=resolved.profile)
    proof = find_proof(operator, link, snapshot.code_id, choice, resolved.config, request.overrides)
    require_data(link, resolved.config.data)
    notes = [*resolved.notes, *note_another_probed(proof.report, resolved.config)]
    staging = estimate_staging(resolved.config)
    notes += [staging.sentence()] if staging.is_long else []
    notes += [f"{found.name}: {found.message}" for found in findings if found.status == "warn"]
    return ReadyPod(link, resolved, proof, notes)


def read_startable_pod(
    link: PodLink, hardware: HardwareProfile, overrides: Mapping[str, str]
) -> PodFacts:
    """What can change between preflight and launch: disk and cards.

    Raises:
        LocalResourceError: If the pod lacks what a run is started with.
        RefusedError: If a watchdog has marked it.
    """
    host = read_host(link.transport, link.record.python, link.record.root)
    cards = read_cards(link.transport) if hardware.needs_card else HardwareFacts()
    require_tmux(link, host)
    refuse_marked(link, overrides)
    return PodFacts(host, PythonFacts(), cards)


def require_data(link: PodLink, data: DataConfig) -> None:
    """A local data set must be on the pod before anything is started.

    Raises:
        ConfigurationError: If its path is relative.
        NotFoundError: If it is not there.
    """
    if data.source != "fineweb_edu_local":
        return
    path = PurePosixPath(data.path)
    require_absolute_data(data, "pod")
    if link.transport.run(("test", "-e", str(path)), timeout_s=QUICK_S).exit_code != 0:
        message = f"The data set `{path}` does not exist on pod `{link.record.name}`"
        raise NotFoundError(message, hint="Set `data.path` to a file or folder on the pod")


def require_absolute_data(data: DataConfig, machine: str) -> None:
    """Raise ConfigurationError if data of a kind of machine are named by a relative path."""
    path = PurePosixPath(data.path)
    if data.source == "fineweb_edu_local" and not path.is_absolute():
        message = (
            f"data.path `{printable(str(path))}` is relative, and it must be absolute on a "
            f"{machine}"
        )
        raise ConfigurationError(message, hint="Name it in full: `--set data.path=/folder/text`")


def manifest_of(
    operator: Operator, request: LaunchRequest, ready: ReadyPod, snapshot: Snapshot
) -> RunManifest:
    """The manifest of the first attempt on a pod."""
    proof = ready.proof
    return new_manifest(
        operator, ready.resolved, snapshot,
        run_id=request.run_id, overrides=request.overrides, command=request.command,
    ).model_copy(
        update={
            "pod_id": ready.link.record.pod_id,
            "pod_facts": proof.pod_facts,
            "preflight_sha256": proof.sha256,
            "kernels": proof.kernels,
            "resume": request.resume_from or AUTO,
        }
    )  # fmt: skip


def new_manifest(
    operator: Operator,
    resolved: ResolvedConfig,
    snapshot: Snapshot,
    *,
    run_id: str,
    overrides: Mapping[str, str],
    command: Sequence[str],
) -> RunManifest:
    """What the manifest of a first attempt says wherever it is; without `run_id` it makes one."""
    now_unix_s = operator.clock.unix_s()
    day = datetime.fromtimestamp(now_unix_s, UTC)
    return RunManifest(
        run_id=run_id or new_run_id(resolved.config.recipe, day),
        attempt_id=new_attempt_id(),
        config=resolved.config,
        origins=resolved.origins,
        config_sha256=resolved.sha256,
        profile=resolved.profile,
        code_id=snapshot.code_id,
        code_commit=snapshot.commit,
        dirty_sha256=snapshot.dirty_sha256,
        lock_sha256=snapshot.lock_sha256,
        overrides=dict(overrides),
        command=list(command),
        created_unix_s=now_unix_s,
    )


def require_run_id(run_id: str) -> None:
    """Raise ConfigurationError if it cannot be the id of a run; an empty one is not chosen yet."""
    try:
        if run_id:
            check_run_id(run_id)
    except ValueError as error:
        message = f"Run id `{printable(run_id)}` cannot be used"
        raise ConfigurationError(message, hint=str(error)) from error


def _plan(
    run: RunHandle, snapshot: Snapshot, manifest: RunManifest, module: str, notes: Sequence[str]
) -> Plan:
    link, config, session = run.link, manifest.config, session_name(run.run_id)
    code = link.code(snapshot.code_id)
    shipped = has_code(link.transport, link.record.python, code)
    changes = " + changes" if snapshot.dirty_sha256 else ""
    steps = [
        Step(
            "ship code",
            f"{snapshot.size}, commit {snapshot.commit[:12]}{changes}",
            files=(str(code),),
            is_done=shipped,
        ),
        Step(
            "prepare run",
            f"configuration sha256 {manifest.config_sha256[:12]}",
            files=(str(run.run_dir / "manifest.json"),),
        ),
        Step(
            "start training",
            f"tmux session {session}, window train",
            command=train_command(run, module),
        ),
        Step(
            "start watchdog",
            f"tmux session {session}, window watchdog",
            command=watchdog_command(run, module),
        ),
    ]
    title = (
        f"Launch {run.run_id} on pod {run.pod}: "
        f"{count_of(config.schedule.steps, 'step')} of "
        f"{count_of(config.batch.tokens_per_step, 'token')}"
    )
    title += f", shared by {config.num_ranks} ranks" if config.num_ranks > 1 else ""
    return plan_of(title, steps, notes)


def execute_launch(operator: Operator, planned: LaunchPlan) -> Launched:
    """Carry out a plan; repeated after a cut, it continues where it stopped.

    Raises:
        StateConflictError: If another run has the id, its directory is not a run, or another
            command starts it or has started it on another pod.
        OpsError: If the run does not come up; the message is the trainer's own last word.
    """
    run, overrides = planned.run, planned.manifest.overrides

    def begin() -> None:
        ship_to(operator, run.link, planned.snapshot)
        operator.store.save_run(record_of(run.link, make_run_directory(run, planned.manifest)))

    start = AttemptStart(
        act="launch",
        runs=(run,),
        module=planned.trainer_module,
        # It may have been started since the plan was shown, there or on a third pod.
        take=lambda: [
            plan_takeover(operator, operator.store.find_run(run.run_id), run.link, overrides)
        ],
        begin=begin,
        may_be_started=True,
    )
    return launched_of(run, start_attempt(operator, start))


def make_run_directory(run: RunHandle, planned: RunManifest) -> RunManifest:
    """Make the run directory on a pod, or find it there; the manifest that it has."""
    manifest = with_parent(run.link, planned)
    reply = ask(run, PrepareRunAction(run_dir=Path(run.run_dir), manifest=manifest))
    written = reply.manifest or manifest
    require_run(run.link, written, run.run_id)
    return written


def launched_of(run: RunHandle, beat: FirstBeat) -> Launched:
    """What a launch came to."""
    report = beat.report
    return Launched(
        run_id=report.run_id,
        pod=run.pod,
        run_dir=report.run_dir,
        attempt=report.manifest.attempt,
        is_new=beat.after_s is not None,
        state=report.state,
        why=report.why,
        first_beat_after_s=beat.after_s,
        data=report.data,
        pods=tuple(one.pod for one in report.pods),
    )


def make_ready(operator: Operator, request: LaunchRequest, agree: Callable[[Plan], None]) -> None:
    """Provision a pod and run its preflight, whichever of them was not done before.

    `agree` shows a plan that changes something; it raises unless the operator agrees.
    """
    require_run_id(request.run_id)
    planned = plan_provision(operator, request.pod, request.choice.profile)
    if planned.plan.changes:
        agree(planned.plan)
        execute_provision(operator, planned)
    if PREFLIGHT in request.overrides:
        return
    pod = planned.link.record
    hardware = load_hardware(require_profile(operator, request.choice, pod.profile))
    code_id = take_snapshot().code_id
    kept = operator.store.newest_report(pod.pod_id, code_id, hardware.name)
    if kept is not None and not blocking_checks(kept[1].checks):
        return
    found = run_preflight(operator, pod.name, request.choice, request.overrides)
    refusal = refusal_of(found)
    if refusal is not None:
        raise refusal
    operator.tell(
        f"preflight of {pod.name}: {found.verdict}, {count_of(len(found.report.checks), 'check')}"
    )
