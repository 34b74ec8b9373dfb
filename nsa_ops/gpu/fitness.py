"""Judge one card: is it the wanted one, whole, free, and able to compute what the profile asks."""

from collections import Counter
from collections.abc import Iterator, Sequence

from nsa_core.config.profile import HardwareProfile
from nsa_core.rundir.report import CheckResult, Status, checked
from nsa_ops.gpu.card import BF16_CAPABILITY, GPU, Process
from nsa_ops.gpu.condition import judge_condition
from nsa_ops.quantities import count_of

MAX_BUSY_MIB = 600
#: Above this share of the memory in use, no run that was made for the card fits beside it.
MAX_BUSY_SHARE = 0.5
#: A process below this is a desktop or a probe, not a job.
MIN_PROCESS_MIB = 100
HUNG_UTILIZATION_PERCENT = 95
#: A working card draws more; one that waits for ever inside a kernel draws little.
HUNG_POWER_SHARE = 0.3
#: What the smallest card of any profile has, and the oldest capability; used without a profile.
SMALLEST_GIB = 16.0
OLDEST_CAPABILITY = 7.0
_MEMORY_TOLERANCE = 0.9
_MIB_PER_GIB = 1024
_OTHER_CARD = "Take a card that the profile names, or a profile that names this card"


def judge_card(
    gpu: GPU, profile: HardwareProfile | None, others: Sequence[HardwareProfile] = ()
) -> list[CheckResult]:
    """Every check for which the card has a value, or a place for one: then it is unknown.

    Args:
        gpu: The card.
        profile: What is wanted; None judges whether any run could use it.
        others: Profiles to name as the nearest, if it is not the wanted card.
    """
    return [
        *_card(gpu, profile, others),
        *_memory(gpu, profile),
        *_precision(gpu, profile),
        *_mig(gpu),
        *_free(gpu),
        *_display(gpu),
        *_activity(gpu),
        *judge_condition(gpu),
        *_unreported(gpu),
        *_answers(gpu),
    ]


def nearest_profile(gpu: GPU, profiles: Sequence[HardwareProfile]) -> HardwareProfile | None:
    """The profile that names the card, else the one nearest in capability, then in memory."""
    cards = [profile for profile in profiles if profile.needs_card]
    named = next((profile for profile in cards if profile.matches(gpu.name)), None)
    capability, memory_gib = gpu.capability, (gpu.memory_mib or 0) / _MIB_PER_GIB
    if named or capability is None:
        return named

    def distance(profile: HardwareProfile) -> tuple[float, float]:
        gap = abs((profile.compute_capability or 0.0) - capability)
        return gap, min((abs(size - memory_gib) for size in profile.memory_gib), default=0.0)

    return min(cards, key=distance, default=None)


def _card(
    gpu: GPU, profile: HardwareProfile | None, others: Sequence[HardwareProfile]
) -> Iterator[CheckResult]:
    name, command = f"{gpu.label}.card", "nvidia-smi -L"
    if profile is None or "name" not in gpu.reported:
        return
    if not gpu.name:
        hint = f"Run `{command}` on the machine"
        yield checked(name, "unknown", "the card's name is unknown", command=command, hint=hint)
        return
    status: Status = "pass" if profile.matches(gpu.name) else "fail"
    message = gpu.name
    if status == "fail":
        message = f"{gpu.name} is not a card of profile {profile.name}"
        if gpu.name.endswith("...") and gpu.capability is None:
            status = "unknown"  # the table cut the name off before what tells cards apart
    nearest = nearest_profile(gpu, [one for one in others if one.name != profile.name])
    hint = f"The nearest profile is `{nearest.name}`: {nearest.description}" if nearest else ""
    yield checked(
        name, status, message, limit=profile.description, command=command, hint=hint or _OTHER_CARD
    )


def _memory(gpu: GPU, profile: HardwareProfile | None) -> Iterator[CheckResult]:
    if "memory_mib" not in gpu.reported:
        return
    name = f"{gpu.label}.memory"
    smallest = min(profile.memory_gib, default=0.0) if profile else SMALLEST_GIB
    limit_mib = _MEMORY_TOLERANCE * smallest * _MIB_PER_GIB
    limit = f">= {limit_mib:.0f} MiB ({smallest:g} GB card)"
    if gpu.memory_mib is None:
        message = "nvidia-smi does not report the card's memory"
        yield checked(name, "unknown", message, limit=limit, hint="See `nvidia-smi -q -d MEMORY`")
        return
    is_enough = gpu.memory_mib >= limit_mib
    message = f"{gpu.memory_mib} MiB in all"
    if not is_enough:
        who = f"profile {profile.name}" if profile else "the smallest profile"
        message = f"{message}, less than the {smallest:g} GB that {who} needs"
    yield checked(
        name, "pass" if is_enough else "fail", message, measured=f"{gpu.memory_mib} MiB",
        limit=limit, command="nvidia-smi -q -d MEMORY",
        hint="Take a card with the memory the profile names",
    )  # fmt: skip


def _precision(gpu: GPU, profile: HardwareProfile | None) -> Iterator[CheckResult]:
    capability = gpu.capability
    if capability is None:
        return
    wanted = profile.precisions[0] if profile else ""
    has_bf16 = capability >= BF16_CAPABILITY
    message = f"compute capability {capability:g} {'has bf16' if has_bf16 else 'has no bf16'}"
    status: Status = "pass"
    if capability < OLDEST_CAPABILITY:
        status, message = "fail", f"{message} and is older than that of every profile"
    elif profile is not None and not has_bf16:
        status = "fail" if wanted == "bf16" else "pass"
        needs = f", and profile {profile.name} needs it"
        message += needs if status == "fail" else f"; the profile computes in {wanted}"
    elif not has_bf16:
        status = "warn"
    yield checked(
        f"{gpu.label}.precision", status, message, measured=f"{capability:g}",
        limit=f">= {BF16_CAPABILITY:g} for bf16", command="nvidia-smi --query-gpu=compute_cap",
        hint="Take an Ampere card or later, or a profile with fp16 (`v100`, `t4`)",
    )  # fmt: skip


def _mig(gpu: GPU) -> Iterator[CheckResult]:
    name, command = f"{gpu.label}.mig", "nvidia-smi -L"
    hint = "Ask for a whole card; with root, `nvidia-smi -mig 0` and a reset make it one"
    if gpu.is_mig or gpu.slices:
        slices = _describe_slices(gpu)
        yield checked(
            name, "fail", f"MIG divides the card: {slices}", measured=slices,
            limit="a whole card", command=command, hint=hint,
        )  # fmt: skip
    elif gpu.is_mig_pending:
        message = "MIG will divide the card at its next reset"
        yield checked(name, "warn", message, command=command, hint=hint)
    elif "is_mig" in gpu.reported:
        yield checked(name, "pass", "the card is whole", command=command)


def _describe_slices(gpu: GPU) -> str:
    """How many slices, and how much each has: `2 x 1g.10gb (9984 MiB, 16 SMs)`."""
    if not gpu.slices:
        return "no slice is listed, so their size is unknown"
    counts = Counter((one.name or "slice", one.memory_mib, one.num_sm) for one in gpu.slices)
    parts = []
    for (name, memory, num_sm), count in counts.items():
        sizes = [f"{memory} MiB" if memory is not None else "memory unknown"]
        sizes += [f"{num_sm} SMs"] if num_sm is not None else []
        parts.append(f"{count} x {name} ({', '.join(sizes)})")
    whole = f" of {gpu.memory_mib} MiB" if gpu.memory_mib else ""
    return f"{count_of(len(gpu.slices), 'slice')}{whole}: {', '.join(parts)}"


def _free(gpu: GPU) -> Iterator[CheckResult]:
    """Whether others use the card, by its memory and by the list of processes."""
    if not gpu.reported & {"memory_used_mib", "processes"}:
        return
    name, used = f"{gpu.label}.free", gpu.memory_used_mib
    jobs, held = _jobs(gpu), _held_mib(gpu)
    if used is None and not jobs:
        message = "nvidia-smi does not report the memory in use"
        yield checked(name, "unknown", message, hint="See `nvidia-smi` on the machine")
        return
    use = describe_use(gpu)
    is_full = gpu.memory_mib is not None and held > MAX_BUSY_SHARE * gpu.memory_mib
    status: Status = "fail" if is_full else "warn" if use else "pass"
    message = use or _describe_held(gpu)
    yield checked(
        name, status, message, measured=f"{held} MiB", limit=f"<= {MAX_BUSY_MIB} MiB",
        command="nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv",
        hint="End it if it is yours, wait for it, or take a free card",
    )  # fmt: skip


def describe_use(gpu: GPU) -> str:
    """How others use the card: memory and processes; empty if nobody does, or nobody can tell."""
    jobs = _jobs(gpu)
    if _held_mib(gpu) <= MAX_BUSY_MIB and not jobs:
        return ""
    who = ", ".join(_describe_process(process) for process in jobs[:4])
    unseen = "no process is listed: it is outside this container, or hidden"
    return f"{_describe_held(gpu)} by another process: {who or unseen}"


def _jobs(gpu: GPU) -> list[Process]:
    return [process for process in gpu.processes if _is_job(process)]


def _held_mib(gpu: GPU) -> int:
    return max(gpu.memory_used_mib or 0, sum(one.memory_mib or 0 for one in _jobs(gpu)))


def _describe_held(gpu: GPU) -> str:
    held = f"{_held_mib(gpu)} MiB in use"
    return held if gpu.memory_used_mib is not None else f"at least {held}"


def _is_job(process: Process) -> bool:
    draws_only = process.kind == "G"
    return not draws_only and (process.memory_mib is None or process.memory_mib >= MIN_PROCESS_MIB)


def _describe_process(process: Process) -> str:
    """A process in words: `python (pid 5997, 794 MiB)`."""
    memory = "memory unknown" if process.memory_mib is None else f"{process.memory_mib} MiB"
    return f"{process.name or 'unnamed'} (pid {process.pid}, {memory})"


def _display(gpu: GPU) -> Iterator[CheckResult]:
    if gpu.has_display:
        message = (
            "this card drives a screen: the desktop uses its memory and time, and a kernel that "
            "runs for seconds freezes the desktop or is killed"
        )
        hint = "Switch the desktop off, or put the screen on another card, before a long run"
        command = "nvidia-smi --query-gpu=display_active --format=csv"
        yield checked(f"{gpu.label}.display", "warn", message, command=command, hint=hint)


def _could_hang(gpu: GPU) -> bool:
    """Whether somebody computes on it and its memory is idle; without a program, loads mislead.

    A driver that has just been loaded reports full load while it clears the memory, and Windows'
    driver counts the desktop.
    """
    held = any(_is_job(one) for one in gpu.processes) or (gpu.memory_used_mib or 0) > MAX_BUSY_MIB
    is_drawing = bool(gpu.has_display or gpu.driver_model)
    return held and not is_drawing and not gpu.memory_load_percent


def _activity(gpu: GPU) -> Iterator[CheckResult]:
    """Full load at little power: a kernel that waits and never ends."""
    load, power, most = gpu.utilization_percent, gpu.power_w, gpu.power_limit_w
    if load is None or power is None or not most or not _could_hang(gpu):
        return
    if load < HUNG_UTILIZATION_PERCENT or power > HUNG_POWER_SHARE * most:
        return
    yield checked(
        f"{gpu.label}.activity", "fail",
        f"occupied and likely hung: {load} % busy at {power:g} W of {most:g} W",
        measured=f"{load} %, {power:g} W",
        limit=f"more than {HUNG_POWER_SHARE * most:.0f} W when busy",
        command="nvidia-smi --query-gpu=utilization.gpu,power.draw,power.limit --format=csv",
        hint="Find the job (`nvidia-smi`, `ps`) and end it; reset the card if there is none",
    )  # fmt: skip


def _unreported(gpu: GPU) -> Iterator[CheckResult]:
    if not gpu.unknown:
        return
    some = ", ".join(gpu.unknown[:5])
    more = f" and {len(gpu.unknown) - 5} more" if len(gpu.unknown) > 5 else ""
    count = count_of(len(gpu.unknown), "value")
    message = f"the card does not report {count}, so unknown and not 0: {some}{more}"
    yield checked(f"{gpu.label}.untold", "skipped", message, measured="unknown")


def _answers(gpu: GPU) -> Iterator[CheckResult]:
    if gpu.answers_badly:
        message = "nvidia-smi prints ERR! or says that the card is lost"
        hint = "Reboot, or take another pod; the kernel log says why (`dmesg | grep -i xid`)"
        yield checked(f"{gpu.label}.answers", "fail", message, command="nvidia-smi", hint=hint)
