"""Judge a machine before anything is made on it: disk, memory, limits, clock; pure."""

from nsa_core.rundir.report import CheckResult, Status, checked
from nsa_ops.machine.bare import BareFacts
from nsa_ops.machine.judge_host import judge_limits
from nsa_ops.provision.receipt import ProvisionReceipt
from nsa_ops.provision.want import CUDA_ENVIRONMENT_BYTES, ENVIRONMENT_BYTES
from nsa_ops.quantities import format_bytes
from nsa_ops.store import PodRecord

#: What is always kept free: code, receipt, logs.
_LITTLE_BYTES = 2**30


def judge_bare(
    facts: BareFacts, *, build: str, has_environment: bool, is_local: bool, laptop_unix_s: float
) -> list[CheckResult]:
    """Every check on the machine itself.

    Args:
        facts: What it said.
        build: Torch build of the environment.
        has_environment: The environment is made already, so it needs no more space.
        is_local: It is the operator's own machine: no second clock to compare.
        laptop_unix_s: The operator's clock when it was asked.
    """
    need = ENVIRONMENT_BYTES.get(build, CUDA_ENVIRONMENT_BYTES)
    return [
        _disk(facts, _LITTLE_BYTES if has_environment else need),
        *judge_limits(facts.as_host("0.0"), is_local=is_local, laptop_unix_s=laptop_unix_s),
        _time(facts),
    ]


def judge_environment(receipt: ProvisionReceipt | None, pod: PodRecord, lock: str) -> CheckResult:
    """Whether runs use an environment of ours, made from the packages this code is locked to.

    Args:
        receipt: Of the pod's provisioning; None if it never was.
        pod: The pod.
        lock: Hash of the locks of this code; empty if it has none.
    """
    name, hint = "python.environment", f"Run `nsa-ops provision {pod.name}`"
    if receipt is None or receipt.python != pod.python:
        message = f"`{pod.python}` was not made by `nsa-ops provision`: its versions are its own"
        return checked(name, "skipped", message)
    measured, limit = receipt.lock_sha256[:12], lock[:12]
    if lock and receipt.lock_sha256 != lock:
        message = "it was made from other locks than this code has"
        return checked(name, "warn", message, measured=measured, limit=limit, hint=hint)
    flash = receipt.flash_attention
    message = f"made from these locks; torch {receipt.torch_build}; flash-attn {flash}"
    return checked(name, "pass", message)


def _disk(facts: BareFacts, need: int) -> CheckResult:
    name, command = "host.disk", f"df -h {facts.disk_path}"
    limit, hint = f">= {format_bytes(need)}", "Free space, or name another root with `pod add`"
    if not facts.disk_writable:
        message = f"this login cannot write in {facts.disk_path}"
        return checked(name, "fail", message, limit=limit, command=command, hint=hint)
    free = facts.disk_free_bytes
    if free is None:
        message = f"free space in {facts.disk_path} cannot be told"
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
        message = "no service tells whether the clock is kept (a container cannot see its host's)"
        return checked(name, "unknown", message, command=command, hint=hint)
    if facts.is_synchronised:
        return checked(name, "pass", "the clock is kept by a time server", command=command)
    message = "the clock is not kept by a time server"
    return checked(name, "warn", message, command=command, hint=hint)
