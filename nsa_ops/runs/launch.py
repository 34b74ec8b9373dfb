"""Launch: resolve, refuse, plan, ship, prepare, start; done when the run is up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from nsa_core.config.profile import HardwareProfile
from nsa_core.config.recipe import ResolvedConfig
from nsa_core.config.training import DataConfig
from nsa_core.rundir.attempt_id import new_attempt_id
from nsa_core.rundir.data_account import DataAccount
from nsa_core.rundir.layout import check_run_id, new_run_id
from nsa_core.rundir.manifest import RunManifest
from nsa_core.rundir.report import CheckResult
from nsa_ops.agents import ask, probe_run, require_run
from nsa_ops.configure import Choice, load_hardware, require_profile
from nsa_ops.context import Operator, PodLink
from nsa_ops.errors import ConfigurationError, NotFoundError, RefusedError
from nsa_ops.machine.hardware import HardwareFacts, read_cards
from nsa_ops.machine.host import PythonFacts, read_host
from nsa_ops.plan import Plan, Step, plan_of
from nsa_ops.pod.messages import PrepareRunAction, RunReport
from nsa_ops.pods.pods import choose_pod
from nsa_ops.preflight.guardrails import (
    PREFLIGHT,
    apply_overrides,
    check_guardrails,
)
from nsa_ops.preflight.marked import refuse_marked
from nsa_ops.preflight.preflight import (
    PodFacts,
    resolve_for,
    subject_of,
)
from nsa_ops.preflight.probed import note_another_probed
from nsa_ops.preflight.proof import Proof, find_proof
from nsa_ops.quantities import count_of
from nsa_ops.remote.snapshot import Snapshot, has_code, ship, take_snapshot
from nsa_ops.remote.tmux import session_name
from nsa_ops.remote.transport import QUICK_S
from nsa_ops.runs.checkpoints import with_parent, with_parent_as_planned
from nsa_ops.runs.choose import LIVE, record_of
from nsa_ops.runs.lease import lease_held, plan_takeover, record_takeover
from nsa_ops.runs.session import (
    TRAINER_MODULE,
    require_tmux,
    start_session,
    start_watchdog,
    train_command,
    watchdog_command,
)
from nsa_ops.runs.wait import await_first_beat
from nsa_ops.staging_need import estimate_staging


@dataclass(frozen=True)
class LaunchRequest:
    """What the operator asked for.

    Attributes:
        choice: Recipe, profile and values.
        pod: Pod; None where only one fits.
        run_id: Run id; empty makes a new one.
        resume_from: Folder of a checkpoint on the pod to begin from; empty begins afresh.
        overrides: Guardrails that may be passed, with the reason.
        command: The words that asked for it, for the record.
        trainer_module: Python module that trains.
    """

    choice: Choice
    pod: str | None = None
    run_id: str = ""
    resume_from: str = ""
    overrides: Mapping[str, str] = field(default_factory=dict)
    command: Sequence[str] = ()
    trainer_module: str = TRAINER_MODULE


@dataclass(frozen=True)
class LaunchPlan:
    """A launch that may be done.

    Attributes:
        link: Pod it goes to.
        snapshot: Code it runs.
        manifest: What will be written.
        plan: What will be done.
        trainer_module: Python module that trains.
    """

    link: PodLink
    snapshot: Snapshot
    manifest: RunManifest
    plan: Plan
    trainer_module: str


@dataclass(frozen=True)
class Launched:
    """A run that is there now.

    Attributes:
        run_id: Its id.
        pod: Where.
        run_dir: Its directory on the pod.
        attempt: Current attempt.
        is_new: This launch made it; otherwise the same launch was done before.
        state: State when it was last looked at.
        why: The evidence for it.
        first_beat_after_s: Seconds from the start to the first heartbeat; None if it was not new.
        data: What was dropped of its data, and why; None before it was opened.
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


def plan_launch(operator: Operator, request: LaunchRequest) -> LaunchPlan:
    """Everything that can be refused is refused here, before anything changes.

    Raises:
        ConfigurationError: If the configuration cannot be used.
        RefusedError: If a guardrail or the preflight stands against it.
        LocalResourceError: If the pod lacks what a run is started with.
        NotFoundError: If the pod, the data or the checkpoint does not exist.
        StateConflictError: If the run is known on another pod, and runs there for all one can tell.
        VerificationError: If the checkpoint is not whole; known only where the pod has the code.
    """
    check_request(request)
    wanted = request.pod or operator.settings.values.pod or None
    link = operator.link(choose_pod(operator.store, wanted))
    known = operator.store.find_run(request.run_id)
    taken = plan_takeover(operator, known, link, request.overrides)
    hardware = load_hardware(require_profile(operator, request.choice, link.record.profile))
    facts = read_live_facts(link, hardware)
    require_tmux(link, facts.host)
    refuse_marked(link, request.overrides)
    resolved = resolve_for(operator, request.choice, hardware, facts)
    findings = check_guardrails(subject_of(resolved, hardware, facts))
    findings = apply_overrides(findings, request.overrides)
    refuse_failures(findings)
    snapshot = take_snapshot()
    proof = find_proof(
        operator, link, snapshot.code_id,
        replace(request.choice, profile=resolved.profile), resolved.config,
        is_overridden=PREFLIGHT in request.overrides,
    )  # fmt: skip
    require_data(link, resolved.config.data)
    manifest = _manifest(operator, request, link, resolved, snapshot, proof)
    manifest = with_parent_as_planned(link, manifest)
    notes = [*taken.notes, *resolved.notes, *note_another_probed(proof.report, resolved.config)]
    staging = estimate_staging(resolved.config)
    notes += [staging.sentence()] if staging.is_long else []
    return LaunchPlan(
        link=link,
        snapshot=snapshot,
        manifest=manifest,
        plan=_plan(link, snapshot, manifest, request.trainer_module, findings, notes),
        trainer_module=request.trainer_module,
    )


def read_live_facts(link: PodLink, hardware: HardwareProfile) -> PodFacts:
    """What can change between preflight and launch: disk and cards."""
    host = read_host(link.transport, link.record.python, link.record.root)
    cards = read_cards(link.transport) if hardware.needs_card else HardwareFacts()
    return PodFacts(host, PythonFacts(), cards)


def refuse_failures(findings: Sequence[CheckResult]) -> None:
    """Stop if a guardrail stands against the run.

    Raises:
        RefusedError: With the first one's reason and override, and the names of the others.
    """
    failed = [finding for finding in findings if finding.status == "fail"]
    if not failed:
        return
    first, *others = failed
    names = ", ".join(f"`{other.name}`" for other in others)
    more = f" (also {names})" if others else ""
    message = f"Refused by `{first.name}`: {first.message}{more}"
    raise RefusedError(message, hint=first.hint)


def require_data(link: PodLink, data: DataConfig) -> None:
    """A local data set must be on the pod before anything is started.

    Raises:
        ConfigurationError: If its path is relative.
        NotFoundError: If it is not there.
    """
    if data.source != "fineweb_edu_local":
        return
    path = PurePosixPath(data.path)
    if not path.is_absolute():
        message = f"data.path `{path}` is relative, and a pod has no folder it could mean"
        raise ConfigurationError(message, hint="Name it in full: `--set data.path=/folder/text`")
    if link.transport.run(("test", "-e", str(path)), timeout_s=QUICK_S).exit_code != 0:
        message = f"The data set `{path}` does not exist on pod `{link.record.name}`"
        raise NotFoundError(message, hint="Set `data.path` to a file or folder on the pod")


def _manifest(
    operator: Operator,
    request: LaunchRequest,
    link: PodLink,
    resolved: ResolvedConfig,
    snapshot: Snapshot,
    proof: Proof,
) -> RunManifest:
    now_unix_s = operator.clock.unix_s()
    day = datetime.fromtimestamp(now_unix_s, UTC)
    run_id = request.run_id or new_run_id(resolved.config.recipe, day)
    return RunManifest(
        run_id=run_id,
        attempt_id=new_attempt_id(),
        config=resolved.config,
        origins=resolved.origins,
        config_sha256=resolved.sha256,
        profile=resolved.profile,
        code_id=snapshot.code_id,
        code_commit=snapshot.commit,
        dirty_sha256=snapshot.dirty_sha256,
        lock_sha256=snapshot.lock_sha256,
        pod_id=link.record.pod_id,
        pod_facts=proof.pod_facts,
        preflight_sha256=proof.sha256,
        kernels=proof.kernels,
        overrides=dict(request.overrides),
        resume=request.resume_from or "auto",
        command=list(request.command),
        created_unix_s=now_unix_s,
    )


def check_request(request: LaunchRequest) -> None:
    """Refuse what no pod has to be asked about, before one is asked, prepared or probed.

    Raises:
        ConfigurationError: If the run id cannot be used.
    """
    if not request.run_id:
        return
    try:
        check_run_id(request.run_id)
    except ValueError as error:
        message = f"Run id `{request.run_id}` cannot be used"
        raise ConfigurationError(message, hint=str(error)) from error


def _plan(
    link: PodLink,
    snapshot: Snapshot,
    manifest: RunManifest,
    module: str,
    findings: Sequence[CheckResult],
    notes: Sequence[str],
) -> Plan:
    code, run_dir = link.code(snapshot.code_id), link.run_dir(manifest.run_id)
    config, names = manifest.config, (snapshot.code_id, manifest.run_id, module)
    shipped = has_code(link.transport, link.record.python, code)
    size = f"{count_of(len(snapshot.files), 'file')}, {snapshot.total_bytes // 1024} KiB"
    steps = [
        Step(
            "ship code",
            f"{size}, commit {snapshot.commit[:12]}{' + changes' if snapshot.dirty_sha256 else ''}",
            files=(str(code),),
            is_done=shipped,
        ),
        Step(
            "prepare run",
            f"configuration sha256 {manifest.config_sha256[:12]}",
            files=(str(run_dir / "manifest.json"),),
        ),
        Step(
            "start training",
            f"tmux session {session_name(manifest.run_id)}, window train",
            command=train_command(link, *names),
        ),
        Step(
            "start watchdog",
            f"tmux session {session_name(manifest.run_id)}, window watchdog",
            command=watchdog_command(link, *names),
        ),
    ]
    title = (
        f"Launch {manifest.run_id} on pod {link.record.name}: "
        f"{count_of(config.schedule.steps, 'step')} of "
        f"{count_of(config.batch.tokens_per_step(), 'token')}"
    )
    warned = [f"{found.name}: {found.message}" for found in findings if found.status == "warn"]
    return plan_of(title, steps, [*notes, *warned])


def execute_launch(operator: Operator, planned: LaunchPlan) -> Launched:
    """Carry out a plan; asking again after a cut goes on where it stopped.

    Raises:
        StateConflictError: If another run has the id, its directory is not a run, or another
            command starts it or has started it on another pod.
        OpsError: If the run does not come up; the message is the trainer's own last word.
    """
    with lease_held(operator, planned.manifest.run_id):
        return _launch(operator, planned)


def _launch(operator: Operator, planned: LaunchPlan) -> Launched:
    link, manifest = planned.link, planned.manifest
    code_id, run_id = planned.snapshot.code_id, manifest.run_id
    overrides = manifest.overrides
    # It may have been started since the plan was shown, there or on a third pod.
    taken = plan_takeover(operator, operator.store.find_run(run_id), link, overrides)
    detail = {"pod": link.record.name, "code_id": code_id, "module": planned.trainer_module}
    detail |= {"moved_from": taken.left} if taken.left else {}
    with operator.store.intent("launch", run_id, **detail):
        record_takeover(operator, taken, overrides)
        code = link.code(code_id)
        if ship(planned.snapshot, link.transport, link.record.python, code):
            operator.tell(f"code {code_id} shipped")
        manifest = with_parent(link, manifest)
        run_dir = Path(link.run_dir(run_id))
        reply = ask(link, code_id, PrepareRunAction(run_dir=run_dir, manifest=manifest))
        told = reply.manifest or manifest
        require_run(link, told, run_id)
        remember_run(operator, link, told)
        before = probe_run(link, code_id, run_id)
        if before.state != "planned":
            operator.tell(f"{run_id} was launched before")
            if before.state in LIVE and not before.watchdog_alive:
                start_watchdog(link, code_id, run_id, planned.trainer_module)
                operator.tell("nobody watched it; its watchdog is started")
            return _launched(link, before, is_new=False)
        started_s = operator.clock.monotonic_s()
        start_session(link, code_id, run_id, planned.trainer_module)
        operator.tell(f"started {run_id}; waiting until it has opened its data")
        beat = await_first_beat(operator, link, code_id, run_id, started_s)
    return _launched(link, beat.report, is_new=True, after_s=beat.after_s)


def remember_run(operator: Operator, link: PodLink, manifest: RunManifest) -> None:
    """Let the registry say what runs and on which pod."""
    operator.store.save_run(record_of(link, manifest))


def _launched(
    link: PodLink, report: RunReport, *, is_new: bool, after_s: float | None = None
) -> Launched:
    return Launched(
        run_id=report.run_id,
        pod=link.record.name,
        run_dir=report.run_dir,
        attempt=report.manifest.attempt,
        is_new=is_new,
        state=report.state,
        why=report.why,
        first_beat_after_s=after_s,
        data=report.data,
    )
