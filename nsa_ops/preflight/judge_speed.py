"""Judge what a machine gave when it was really used: speeds against the profile's; pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from nsa_core.config.profile import HardwareProfile
from nsa_core.config.run import RunConfig
from nsa_core.rundir.report import CardSpeed, CheckResult, FirstBatch, MachineSpeed, Status, checked
from nsa_ops.estimate import Estimate, estimate_staging
from nsa_ops.gpu.card import GPU
from nsa_ops.gpu.condition import judge_throttle
from nsa_ops.gpu.tool_output import parse_output
from nsa_ops.preflight.several_cards import num_cards
from nsa_ops.quantities import count_of, format_bytes

COMMAND = "python -m nsa_core.checks.machine"
#: Below this share of what the profile still accepts, the card is not the one it says it is.
FAIL_SHARE = 0.5
#: A saving step stops training for as long as its write takes.
MIN_DISK_MB_S = 100.0
MAX_CHECKPOINT_S = 60.0
#: A card under full load may be held by its power limit, but not at half of its clock.
MIN_CLOCK_SHARE = 0.5
MIN_ALLOCATED_SHARE = 0.85
#: A sum that takes more of a step is not hidden behind the backward pass.
MAX_SUM_SHARE = 0.25
_GRADIENT_BYTES = 4
_SLOW_CARD = "Look at heat, power limit and other users of the card; on a rented pod, take another"
_SLOW_LINK = "Look at the PCIe lanes above, and at other users of the host; else take another pod"
_MB_PER_MIB = 2**20 / 1e6


@dataclass(frozen=True)
class GradientSum:
    """What the cards of a run do together at every step.

    Attributes:
        num_gpus: Cards of the pod that take part.
        num_bytes: Size of all gradients.
        step_s: Shortest time that a step can take; None if unknown.
    """

    num_gpus: int
    num_bytes: int
    step_s: float | None


def plan_gradient_sum(config: RunConfig, estimate: Estimate) -> GradientSum | None:
    """What the run sums at every step; None on one card."""
    cards, best = num_cards(config), estimate.best_tokens_per_s
    if cards < 2:
        return None
    step_s = estimate.tokens_per_step / best if best else None
    return GradientSum(cards, _GRADIENT_BYTES * estimate.parameters.total, step_s)


def judge_speed(
    found: MachineSpeed,
    profile: HardwareProfile,
    checkpoint_bytes: float,
    gradients: GradientSum | None = None,
) -> list[CheckResult]:
    """Every check that the measurements allow.

    Args:
        found: What was measured.
        profile: What is expected.
        checkpoint_bytes: Size of a checkpoint of the run.
        gradients: What its cards sum; None on one card.
    """
    return [
        *_cards(found, profile),
        *_all_reduce(found, profile),
        *_gradient_sum(found, gradients),
        _disk(found, checkpoint_bytes),
        _debugger(found),
        _first_batch(found),
    ]


def _cards(found: MachineSpeed, profile: HardwareProfile) -> Iterator[CheckResult]:
    if not profile.needs_card:
        yield checked("gpu.speed", "skipped", f"profile {profile.name} uses no card")
        return
    for name, problem in found.problems.items():
        if name == "cards" or name.startswith("gpu"):
            where = "gpu" if name == "cards" else name
            message = f"the card could not be used: {problem}"
            yield checked(f"{where}.speed", "fail", message, command=COMMAND, hint=_SLOW_CARD)
    for card in found.cards:
        yield from _card(card, profile)


def _card(card: CardSpeed, profile: HardwareProfile) -> Iterator[CheckResult]:
    name, expected = f"gpu{card.index}", profile.expected
    share = expected.min_fraction
    yield _allocation(name, card)
    if card.is_repeatable is False:
        message = "the same product twice gave different bits"
        hint = "Take another card; this one computes wrong now and then"
        yield checked(f"{name}.repeatable", "fail", message, command=COMMAND, hint=hint)
    elif card.is_repeatable:
        message = "the same product twice gave the same bits"
        yield checked(f"{name}.repeatable", "pass", message, command=COMMAND)
    yield judge_rate(
        f"{name}.gemm", card.gemm_tflops, expected.gemm_tflops, share,
        what=f"{card.dtype} matrix product", unit="TFLOP/s", hint=_SLOW_CARD,
    )  # fmt: skip
    yield judge_rate(
        f"{name}.bandwidth", card.copy_gb_s, expected.bandwidth_gb_s, share,
        what="copy in its own memory", unit="GB/s", hint=_SLOW_CARD,
    )  # fmt: skip
    for way, rate in (("h2d", card.host_to_device_gb_s), ("d2h", card.device_to_host_gb_s)):
        what = "from pinned memory" if way == "h2d" else "into pinned memory"
        yield judge_rate(
            f"{name}.{way}", rate, expected.host_to_device_gb_s, share,
            what=what, unit="GB/s", hint=_SLOW_LINK,
        )  # fmt: skip
    yield from _under_load(name, card)


def _allocation(name: str, card: CardSpeed) -> CheckResult:
    name = f"{name}.allocation"
    if card.allocated_mib is None or not card.free_mib:
        return checked(name, "unknown", "memory was not allocated", command=COMMAND)
    share = card.allocated_mib / card.free_mib
    return checked(
        name,
        "pass" if share >= MIN_ALLOCATED_SHARE else "fail",
        "taken in one piece, written and read",
        measured=f"{card.allocated_mib:.0f} of {card.free_mib:.0f} MiB",
        limit=f">= {100 * MIN_ALLOCATED_SHARE:.0f} % of what is free",
        command=COMMAND,
        hint=_SLOW_CARD,
    )


def judge_rate(
    name: str,
    rate: float | None,
    expected: float | None,
    min_fraction: float,
    *,
    what: str,
    unit: str,
    hint: str,
) -> CheckResult:
    """A rate against what a healthy card reaches; without an expectation it is only reported."""
    if rate is None:
        return checked(name, "unknown", f"{what} was not measured", command=COMMAND, hint=hint)
    measured = f"{rate:.0f} {unit}"
    if expected is None:
        message = f"{what}; the profile expects nothing, so it is only reported"
        return checked(name, "skipped", message, measured=measured, command=COMMAND)
    least = min_fraction * expected
    status: Status = "pass" if rate >= least else "warn" if rate >= FAIL_SHARE * least else "fail"
    return checked(
        name, status, f"{what}, {100 * rate / expected:.0f} % of the {expected:g} expected",
        measured=measured, limit=f">= {least:.0f} {unit}", command=COMMAND, hint=hint,
    )  # fmt: skip


def _under_load(name: str, card: CardSpeed) -> Iterator[CheckResult]:
    """Clock, heat and reasons for being slowed, as nvidia-smi saw them while the card computed."""
    found = parse_output(card.smi_under_load, "nvidia-smi under load").cards
    if not found:
        message = "nvidia-smi reported nothing while the card computed"
        yield checked(f"{name}.clock", "unknown", message, command="nvidia-smi -q -x")
        return
    yield _clock(name, found[0])
    for result in judge_throttle(found[0]):
        yield result.model_copy(update={"name": f"{name}.throttle_under_load"})


def _clock(name: str, gpu: GPU) -> CheckResult:
    name, command = f"{name}.clock", "nvidia-smi -q -d CLOCK"
    now, best = gpu.clock_mhz, gpu.clock_max_mhz
    if now is None or not best:
        return checked(name, "unknown", "the card does not report its clock", command=command)
    heat = f", {gpu.temperature_c} C" if gpu.temperature_c is not None else ""
    power = f", {gpu.power_w:.0f} W" if gpu.power_w is not None else ""
    return checked(
        name,
        "pass" if now >= MIN_CLOCK_SHARE * best else "warn",
        f"of {best} MHz while it computed{heat}{power}",
        measured=f"{now} MHz",
        limit=f">= {MIN_CLOCK_SHARE * best:.0f} MHz",
        command=command,
        hint=_SLOW_CARD,
    )


def _all_reduce(found: MachineSpeed, profile: HardwareProfile) -> Iterator[CheckResult]:
    name = "gpus.all_reduce"
    hint = "Look at `gpu.topology`; set NCCL_DEBUG=INFO to see which way NCCL takes"
    if "all_reduce" in found.problems:
        message = f"the cards could not sum a tensor: {found.problems['all_reduce']}"
        yield checked(name, "fail", message, command=COMMAND, hint=hint)
    elif found.all_reduce is not None:
        summed = found.all_reduce
        yield judge_rate(
            name, summed.bus_gb_s, profile.expected.all_reduce_gb_s, profile.expected.min_fraction,
            what=f"bus bandwidth of {summed.size_mib} MiB over {count_of(summed.num_gpus, 'card')}",
            unit="GB/s", hint=hint,
        )  # fmt: skip
    elif profile.needs_card:
        yield checked(name, "skipped", f"{len(found.cards)} card: nothing to sum with")


def _gradient_sum(found: MachineSpeed, gradients: GradientSum | None) -> Iterator[CheckResult]:
    """How long the sum over the run's cards takes beside a step; it must have been measured."""
    if gradients is None or "all_reduce" in found.problems:
        return
    name, summed = "gpus.gradient_sum", found.all_reduce
    hint = (
        "Lower `runtime.num_gpus`, or look at `gpu.topology`: NVLink is ten times as fast as PCIe"
    )
    count = summed.num_gpus if summed is not None else len(found.cards)
    if summed is None or count < gradients.num_gpus:
        message = f"the run takes {count_of(gradients.num_gpus, 'card')}, and {count} can sum"
        yield checked(name, "fail", message, command=COMMAND, hint=hint)
        return
    moved = gradients.num_bytes * 2 * (gradients.num_gpus - 1) / gradients.num_gpus
    seconds = moved / (summed.bus_gb_s * 1e9)
    message = f"{format_bytes(gradients.num_bytes)} of gradients, summed once a step"
    measured, limit = f"{seconds:.3f} s", ""
    status: Status = "pass"
    if gradients.step_s is not None:
        share = seconds / gradients.step_s
        status = "pass" if share <= MAX_SUM_SHARE else "warn"
        limit = f"<= {100 * MAX_SUM_SHARE:.0f} % of a step of {gradients.step_s:.3f} s"
    yield checked(name, status, message, measured=measured, limit=limit, command=COMMAND, hint=hint)


def _disk(found: MachineSpeed, checkpoint_bytes: float) -> CheckResult:
    name, hint = "host.disk_speed", "Put the root on a local disk (`pod add --root`), or save less"
    if found.disk is None or found.disk.seconds <= 0:
        message = f"the disk was not written: {found.problems.get('disk', 'too fast to tell')}"
        status: Status = "fail" if "disk" in found.problems else "unknown"
        return checked(name, status, message, command=COMMAND, hint=hint)
    rate = found.disk.written_mib * _MB_PER_MIB / found.disk.seconds
    seconds = checkpoint_bytes / 1e6 / rate
    is_good = rate >= MIN_DISK_MB_S and seconds <= MAX_CHECKPOINT_S
    return checked(
        name,
        "pass" if is_good else "warn",
        f"forced to the disk; a checkpoint of {format_bytes(checkpoint_bytes)} takes "
        f"{seconds:.0f} s",
        measured=f"{rate:.0f} MB/s",
        limit=f">= {MIN_DISK_MB_S:.0f} MB/s, <= {MAX_CHECKPOINT_S:.0f} s",
        command=COMMAND,
        hint=hint,
    )


def _debugger(found: MachineSpeed) -> CheckResult:
    name = "host.debugger"
    if found.can_debug:
        message = "a process may read another one's memory, as py-spy does"
        return checked(name, "pass", message, command=COMMAND)
    why = found.problems.get("debugger", "it was not tried")
    hint = (
        "`nsa-ops stack` works without it; for py-spy start the container with "
        "`--cap-add SYS_PTRACE`, or set kernel.yama.ptrace_scope=0"
    )
    status: Status = "unknown" if found.can_debug is None else "warn"
    return checked(name, status, f"py-spy would be refused: {why}", command=COMMAND, hint=hint)


def _first_batch(found: MachineSpeed) -> CheckResult:
    name, batch = "data.first_batch", found.first_batch
    if batch is not None:
        return _judge_batch(name, batch)
    why = found.problems.get("first_batch", "it was not tried")
    hint = "Name the data of the run as the launch will: `--set data.source=… --set data.path=…`"
    status: Status = "fail" if "first_batch" in found.problems else "unknown"
    return checked(name, status, f"the data cannot be read: {why}", command=COMMAND, hint=hint)


def _judge_batch(name: str, batch: FirstBatch) -> CheckResult:
    """Documents came; a staging that would refuse them is a failure, anything dropped a warning."""
    measured, account = f"{batch.seconds:.1f} s", batch.account
    message = (
        f"{count_of(batch.num_documents, 'document')} with "
        f"{count_of(batch.num_characters, 'character')} came from the configured source"
    )
    if account is None or not account.has_findings:
        return checked(name, "pass", message, measured=measured, command=COMMAND)
    looked_at = "of all the data" if batch.is_everything else "of what was looked at"
    status: Status = "fail" if batch.excess else "warn" if account.needs_attention else "pass"
    return checked(
        name,
        status,
        f"{message}; {looked_at}: {batch.excess or account.sentence()}",
        measured=measured,
        command=COMMAND,
        hint=(
            "Repair or remove what is named, or allow it: `--set data.max_dropped=…`, "
            "`--set data.max_dropped_files=…`"
        ),
    )


def judge_staging(
    batch: FirstBatch | None, config: RunConfig, checkpoints_bytes: int, free_bytes: int | None
) -> list[CheckResult]:
    """Whether the shards of a local data set find room beside the checkpoints.

    Args:
        batch: What was read of the data; None if it could not be.
        config: Which tokenizer, and how much is staged.
        checkpoints_bytes: What the run needs beside the shards.
        free_bytes: Free where the shards go; None if unknown.
    """
    if batch is None or batch.source_bytes is None:
        return []
    staging = estimate_staging(config, batch.source_bytes)
    shards = staging.shard_bytes or 0
    measured = f"{format_bytes(shards)} of shards"
    hint = "Free space, or set `data.max_tokens`"
    if free_bytes is None:
        message = f"free space is unknown; {staging.sentence()}"
        return [checked("data.disk", "unknown", message, measured=measured, hint=hint)]
    status: Status = "pass" if shards + checkpoints_bytes <= free_bytes else "fail"
    return [
        checked(
            "data.disk",
            status,
            staging.sentence(),
            measured=measured,
            limit=f"<= {format_bytes(max(0, free_bytes - checkpoints_bytes))} beside checkpoints",
            hint=hint,
        )
    ]
