"""Provision a pod: look, plan, do what is not done, look again after every step."""

from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from nsa_core.rundir.report import CheckResult, Status, checked
from nsa_ops.clock import moment_of
from nsa_ops.configure import RunChoice, load_hardware, require_profile
from nsa_ops.context import LOCAL, Operator, PodLink
from nsa_ops.errors import PartialError, RefusedError, VerificationError
from nsa_ops.machine.bare import BareFacts, read_bare
from nsa_ops.machine.judge_host import judge_limits
from nsa_ops.plan import Plan, Step, plan_of
from nsa_ops.pods.known import choose_pod, meant_pod
from nsa_ops.provision.do_step import Site, do_step
from nsa_ops.provision.needs import choose_build
from nsa_ops.provision.receipt import ProvisionReceipt, parse_receipt
from nsa_ops.provision.steps import plan_steps
from nsa_ops.provision.want import (
    CUDA_ENVIRONMENT_BYTES,
    ENVIRONMENT_BYTES,
    Wanted,
    read_source,
    read_wheel,
)
from nsa_ops.quantities import format_bytes
from nsa_ops.remote.snapshot import take_snapshot
from nsa_ops.store import PodRecord

#: What is always kept free: code, receipt, logs.
_LITTLE_BYTES = 2**30


@dataclass(frozen=True)
class Provisioning:
    """A provisioning that may be done."""

    link: PodLink
    want: Wanted
    facts: BareFacts
    plan: Plan
    checks: tuple[CheckResult, ...]


@dataclass(frozen=True)
class Provisioned:
    """A pod that is ready for a preflight.

    Attributes:
        done: Steps that had to be done; none the second time.
    """

    pod: PodRecord
    receipt: ProvisionReceipt
    done: list[str]
    checks: list[CheckResult]


def plan_provision(
    operator: Operator,
    pod_name: str | None,
    profile: str = "",
    wheel: Path | None = None,
    code: Path | None = None,
) -> Provisioning:
    """Look at a pod and plan what it lacks; changes nothing.

    `wheel` is a flash-attn wheel on this machine to install; `code` is a folder of code to ship
    instead of the code that runs this command.

    Raises:
        RefusedError: If the machine cannot become a pod for this profile.
        OpsError: If the pod cannot be asked.
    """
    pod = meant_pod(operator, pod_name)
    link = operator.link(pod)
    hardware = load_hardware(require_profile(operator, RunChoice(profile=profile), pod.profile))
    snapshot = take_snapshot(code)
    kept = parse_receipt(operator.store.provision(pod.pod_id))
    is_ours = kept is not None and pod.python == kept.python
    want = Wanted(
        pod=pod.name,
        pod_id=pod.pod_id,
        root=PurePosixPath(pod.root),
        is_local=pod.kind == LOCAL,
        python=kept.base_python if kept is not None and is_ours else pod.python,
        profile=hardware,
        snapshot=snapshot,
        source=read_source(snapshot),
        flash=read_wheel(wheel),
    )
    began_s = operator.clock.unix_s()
    facts = _look(link, want)
    laptop_unix_s = moment_of(facts.unix_s, began_s, operator.clock.unix_s())
    steps = plan_steps(want, facts, operator.store.provision(pod.pod_id))
    checks = _judge(want, facts, steps, laptop_unix_s)
    plan = plan_of(f"Provision pod `{pod.name}` for {hardware.name}", steps, _notes(checks))
    return Provisioning(link, want, facts, plan, checks)


def _look(link: PodLink, want: Wanted) -> BareFacts:
    pythons = (want.python,) if want.python else ()
    commit, code_id = want.source.commit or "none", want.snapshot.code_id
    root = str(want.root)
    return read_bare(link.transport, root, code_id=code_id, commit=commit, pythons=pythons)


def _judge(
    want: Wanted, facts: BareFacts, steps: tuple[Step, ...], laptop_unix_s: float
) -> tuple[CheckResult, ...]:
    """Checks on the machine."""
    checks = judge_bare(
        facts,
        build=choose_build(want.profile, facts, want.pod).name,
        has_environment=any(step.is_done for step in steps if step.name == "environment"),
        is_local=want.is_local,
        laptop_unix_s=laptop_unix_s,
    )
    failed = [check for check in checks if check.status == "fail"]
    if failed:
        first = failed[0]
        message = f"Refused by `{first.name}`: {first.message} (needs {first.limit})"
        raise RefusedError(message, hint=first.hint)
    return tuple(checks)


def judge_bare(
    facts: BareFacts, *, build: str, has_environment: bool, is_local: bool, laptop_unix_s: float
) -> list[CheckResult]:
    """Every check on the machine itself."""
    need = ENVIRONMENT_BYTES.get(build, CUDA_ENVIRONMENT_BYTES)
    return [
        _disk(facts, _LITTLE_BYTES if has_environment else need),
        *judge_limits(facts.as_host("0.0"), is_local=is_local, laptop_unix_s=laptop_unix_s),
        _time(facts),
    ]


def _disk(facts: BareFacts, need: int) -> CheckResult:
    name, command = "host.disk", f"df -h {facts.disk_path}"
    limit, hint = f">= {format_bytes(need)}", "Free space, or name another root with `pod add`"
    if not facts.disk_writable:
        message = f"this login cannot write in {facts.disk_path}"
        hint = "Name another root with `pod add`, or let this login write there"
        return checked(name, "fail", message, command=command, hint=hint)
    free = facts.disk_free_bytes
    if free is None:
        message = f"free space in {facts.disk_path} is unknown"
        return checked(name, "unknown", message, limit=limit, command=command, hint=hint)
    message = f"{format_bytes(free)} free in {facts.disk_path}"
    status: Status = "pass" if free >= need else "fail"
    return checked(
        name, status, message, measured=format_bytes(free), limit=limit, command=command, hint=hint
    )


def _time(facts: BareFacts) -> CheckResult:
    """A container cannot ask its host, so unknown is common; the offset is judged beside it."""
    name, command = "host.time_sync", "timedatectl show --property NTPSynchronized"
    hint = "Start time synchronisation there (`timedatectl set-ntp true`)"
    if facts.is_synchronised is None:
        message = "clock synchronisation unknown (a container cannot see its host's)"
        return checked(name, "unknown", message, command=command, hint=hint)
    if facts.is_synchronised:
        return checked(name, "pass", "a time server keeps the clock", command=command)
    message = "no time server keeps the clock"
    return checked(name, "warn", message, command=command, hint=hint)


def _notes(checks: tuple[CheckResult, ...]) -> list[str]:
    return [f"{one.name}: {one.message}" for one in checks if one.status in {"warn", "unknown"}]


def execute_provision(operator: Operator, planned: Provisioning) -> Provisioned:
    """Do every step that is not done; a cut leaves what is done, and a repetition continues there.

    Raises:
        PartialError: If a step did not do what it says.
        OpsError: If a step fails.
    """
    done: list[str] = []
    if planned.plan.changes:
        profile = planned.want.profile.name
        with operator.store.intent("provision", planned.want.pod, profile=profile):
            planned = _do_all(operator, planned, done)
    receipt = parse_receipt(planned.facts.receipt)
    if receipt is None:
        message = f"Pod `{planned.want.pod}` has no receipt that can be read"
        raise VerificationError(message, hint="Repeat `nsa-ops provision`")
    pod = choose_pod(operator.store, planned.want.pod)
    return Provisioned(pod, receipt, done, list(planned.checks))


def _do_all(operator: Operator, planned: Provisioning, done: list[str]) -> Provisioning:
    """Step by step, each followed by a look at what is there now."""
    while planned.plan.changes:
        step = next(step for step in planned.plan.steps if not step.is_done)
        if step.name in done:
            message = f"Step `{step.name}` succeeded on pod `{planned.want.pod}` without a result"
            hint = f"See what it did: {step.shell or ', '.join(step.files)}"
            raise PartialError(message, hint=hint)
        operator.tell(f"{step.name}: {step.detail}")
        with operator.work("provisioning", "step", len(planned.plan.steps)) as work:
            work.done = sum(one.is_done for one in planned.plan.steps)
            work.detail = step.name
            do_step(Site(operator, planned.link, planned.want, planned.facts), step)
            facts = _look(planned.link, planned.want)
        done.append(step.name)
        steps = plan_steps(planned.want, facts, operator.store.provision(planned.want.pod_id))
        plan = plan_of(planned.plan.title, steps, planned.plan.notes)
        planned = replace(planned, facts=facts, plan=plan)
    return planned
