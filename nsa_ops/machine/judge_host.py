"""Judge a machine and its interpreter: one result a check, with value, limit and fix; pure."""

from nsa_core.config.profile import HardwareProfile
from nsa_core.rundir.report import CheckResult, Status, checked
from nsa_ops.estimate import GIB
from nsa_ops.gpu.judge_outputs import explain_error, judge_system
from nsa_ops.gpu.tool_output import parse_system
from nsa_ops.machine.host import NEEDED, HostFacts, PythonFacts
from nsa_ops.quantities import count_of, format_bytes

MIN_PYTHON = (3, 11)
MIN_MEMORY_GIB = 4
MIN_SHM_MIB = 64
MIN_OPEN_FILES = 1024
MAX_CLOCK_OFFSET_S = 5.0
_MIB = 2**20
_PRODUCT = 64.0**3
TOOL_HINTS = {
    "tmux": "Install it (`apt-get install tmux`), or ask whoever owns the machine",
    "rsync": "Install it (`apt-get install rsync`); `backup push` to this machine needs it",
}


def judge_host(facts: HostFacts, *, is_local: bool, laptop_unix_s: float) -> list[CheckResult]:
    """The machine itself.

    Args:
        facts: What it said.
        is_local: It is the operator's own machine: no clock to compare.
        laptop_unix_s: The operator's clock when it was asked.
    """
    return [
        *judge_system(parse_system(facts.system)),
        _python(facts),
        _tool("tmux", facts, is_needed=True),
        _scripts(facts),
        _tool("rsync", facts, is_needed=False),
        _writable(facts),
        *_logout(facts),
        *judge_limits(facts, is_local=is_local, laptop_unix_s=laptop_unix_s),
    ]


def judge_limits(facts: HostFacts, *, is_local: bool, laptop_unix_s: float) -> list[CheckResult]:
    """Memory, shared memory, open files and clock; arguments as in `judge_host`."""
    return [
        _at_least(
            "host.memory", facts.memory_free_bytes, MIN_MEMORY_GIB * GIB, "memory available",
            "Stop other programs on the machine",
        ),
        _at_least(
            "host.shm", facts.shm_free_bytes, MIN_SHM_MIB * _MIB, "free in /dev/shm",
            "Start the container with a larger `--shm-size`",
        ),
        _open_files(facts),
        _clock(facts, is_local=is_local, laptop_unix_s=laptop_unix_s),
    ]  # fmt: skip


def _python(facts: HostFacts) -> CheckResult:
    version, limit = facts.python_version, ".".join(map(str, MIN_PYTHON))
    status: Status = "pass" if facts.python_pair >= MIN_PYTHON else "fail"
    return checked(
        "host.python", status, f"Python {version}", measured=version, limit=f">= {limit}",
        hint=f"Name a Python {limit} or later with `pod add --python`",
    )  # fmt: skip


def _tool(tool: str, facts: HostFacts, *, is_needed: bool) -> CheckResult:
    path = facts.tools.get(tool)
    if path:
        return checked(f"host.{tool}", "pass", path)
    status: Status = "fail" if is_needed else "warn"
    return checked(f"host.{tool}", status, f"{tool} is missing", hint=TOOL_HINTS[tool])


def _scripts(facts: HostFacts) -> CheckResult:
    """Tools that our scripts on a pod call; tmux has a check of its own."""
    name, wanted = "host.tools", [tool for tool in NEEDED if tool != "tmux"]
    missing = [tool for tool in wanted if not facts.tools.get(tool)]
    if not missing:
        return checked(name, "pass", f"{', '.join(wanted)} are there")
    message = f"missing: {', '.join(missing)}"
    hint = "Install them (`apt-get install findutils coreutils`), or run `nsa-ops provision`"
    return checked(name, "fail", message, limit=", ".join(wanted), hint=hint)


def _writable(facts: HostFacts) -> CheckResult:
    free = "unknown" if facts.disk_free_bytes is None else format_bytes(facts.disk_free_bytes)
    if facts.disk_writable:
        return checked("host.disk", "pass", f"{free} free in {facts.disk_path}", measured=free)
    message, hint = f"cannot write in {facts.disk_path}", "Choose another root with `pod add`"
    return checked("host.disk", "fail", message, measured=free, hint=hint)


def _at_least(name: str, found: int | None, limit: int, what: str, hint: str) -> CheckResult:
    bound = f">= {format_bytes(limit)}"
    if found is None:
        return checked(name, "unknown", f"{what}: unknown", limit=bound, hint=hint)
    measured = format_bytes(found)
    status: Status = "pass" if found >= limit else "warn"
    return checked(name, status, f"{measured} {what}", measured=measured, limit=bound, hint=hint)


def _logout(facts: HostFacts) -> list[CheckResult]:
    """Nothing where processes survive a logout, or that is unknown."""
    if not facts.ends_at_logout:
        return []
    message = "this machine ends all processes of a user at the last logout, also a run in tmux"
    hint = (
        "Ask for `KillUserProcesses=no` in /etc/systemd/logind.conf; or `loginctl enable-linger` "
        "and start tmux by `systemd-run --user --scope tmux -L nsa new -d`"
    )
    return [checked("host.logout", "fail", message, command="loginctl", hint=hint)]


def _open_files(facts: HostFacts) -> CheckResult:
    found = facts.open_files_limit
    if found is None:
        return checked("host.open_files", "unknown", "limit of open files: unknown")
    is_enough = found < 0 or found >= MIN_OPEN_FILES  # RLIM_INFINITY is -1
    message = "no limit of open files" if found < 0 else f"{found} open files allowed"
    return checked(
        "host.open_files", "pass" if is_enough else "warn", message, measured=str(found),
        limit=f">= {MIN_OPEN_FILES}",
        hint="Raise it with `ulimit -n 65536` in the pod's start script",
    )  # fmt: skip


def _clock(facts: HostFacts, *, is_local: bool, laptop_unix_s: float) -> CheckResult:
    if is_local:
        return checked("host.clock", "skipped", "the pod is this machine: there is one clock")
    offset_s = facts.unix_s - laptop_unix_s
    status: Status = "pass" if abs(offset_s) <= MAX_CLOCK_OFFSET_S else "warn"
    measured = f"{offset_s:+.1f} s"
    return checked(
        "host.clock", status, f"its clock differs from this laptop's by {measured}",
        measured=measured, limit=f"within {MAX_CLOCK_OFFSET_S:g} s",
        hint="Start time synchronisation on the pod (`timedatectl set-ntp true`)",
    )  # fmt: skip


def judge_python(
    facts: PythonFacts, profile: HardwareProfile, num_gpus: int = 1
) -> list[CheckResult]:
    """The interpreter's packages, and whether torch can use what the profile names.

    Args:
        facts: What it said.
        profile: Wanted cards.
        num_gpus: How many of them the run takes.
    """
    several = [_nccl(facts, num_gpus)] if num_gpus > 1 and profile.needs_card else []
    return [_packages(facts), _torch(facts, profile), _cuda(facts, profile), *several]


def _nccl(facts: PythonFacts, num_gpus: int) -> CheckResult:
    """Whether this torch can sum over cards, and sees as many as the run takes."""
    name, limit = "python.nccl", f">= {count_of(num_gpus, 'card')}"
    if facts.nccl_version is None:
        message = (
            f"this torch has no NCCL, which {count_of(num_gpus, 'card')} need to sum gradients"
        )
        hint = "Install a CUDA build of torch for Linux (`nsa-ops provision`), or take one card"
        return checked(name, "fail", message, hint=hint)
    found = facts.num_cards or 0
    is_enough = found >= num_gpus
    return checked(
        name, "pass" if is_enough else "fail",
        f"NCCL {facts.nccl_version}; torch counts {count_of(found, 'card')}",
        measured=str(found), limit=limit,
        hint="Look at CUDA_VISIBLE_DEVICES on the pod, or lower `runtime.num_gpus`",
    )  # fmt: skip


def _packages(facts: PythonFacts) -> CheckResult:
    if facts.missing:
        message = f"missing packages: {', '.join(facts.missing)}"
        hint = "Run `nsa-ops provision`, which makes an environment from the locks"
        return checked("python.packages", "fail", message, hint=hint)
    return checked("python.packages", "pass", "all packages are there")


def _torch(facts: PythonFacts, profile: HardwareProfile) -> CheckResult:
    if facts.torch_version is None:
        message = f"torch cannot be imported: {facts.error or 'it is not installed'}"
        hint = f"Run `nsa-ops provision`, which installs `{profile.torch_requirement}` there"
        return checked("python.torch", "fail", message, hint=hint)
    cuda = f", CUDA {facts.cuda_version}" if facts.cuda_version else ""
    return checked("python.torch", "pass", f"torch {facts.torch_version}{cuda}")


def _cuda(facts: PythonFacts, profile: HardwareProfile) -> CheckResult:
    if not profile.needs_card:
        return checked("python.cuda", "skipped", f"profile {profile.name} uses no card")
    if facts.hip_version:
        message = (
            f"this torch is built for ROCm {facts.hip_version}, and profiles are of NVIDIA cards"
        )
        hint = "Take a pod with NVIDIA cards and a CUDA build of torch"
        return checked("python.cuda", "fail", message, hint=hint)
    if not facts.cuda_available:
        hint = "Check that `nvidia-smi` works and that torch is a CUDA build"
        message, hint = explain_error(facts.error) or (facts.error or "torch finds no card", hint)
        return checked("python.cuda", "fail", message, hint=hint)
    if facts.product != _PRODUCT:
        message = f"a matrix product on the card gave {facts.product} instead of {_PRODUCT:g}"
        hint = f"This torch has code for {', '.join(facts.architectures)}"
        return checked("python.cuda", "fail", f"{message} {facts.error}".strip(), hint=hint)
    return checked("python.cuda", "pass", "a matrix product on the card is right")
