"""Judge one card's condition: memory errors, spare rows, heat, PCIe, what the driver wants."""

from collections.abc import Callable, Iterator, Sequence

from nsa_core.rundir.report import CheckResult, Status
from nsa_ops.gpu.card import GPU
from nsa_ops.gpu.judge.result import checked
from nsa_ops.quantities import count_of

#: NVIDIA replaces boards of before Ampere at 60 retired pages.
MAX_RETIRED_PAGES = 60
#: Corrected errors do no harm one by one; this many since boot means a bad cell that is read often.
MANY_CORRECTED = 1000
_RESET = "Reset the card (`nvidia-smi --gpu-reset`), reboot, or take another pod"
_REPLACE = "Take another card; this one corrupts memory"
_SLOWED = {
    "hw_thermal": ("the hardware slows it down because it is too hot", "fail"),
    "hw_power_brake": ("the hardware slows it down because the power supply asks for it", "fail"),
    "hw_slowdown": ("the hardware slows it down (heat or power)", "fail"),
    "sw_thermal": ("the driver slows it down because it is hot", "warn"),
}


def judge_condition(gpu: GPU) -> list[CheckResult]:
    """Every check on the card's condition that its facts allow."""
    judges: Sequence[Callable[[GPU], Iterator[CheckResult]]] = (
        _ecc,
        _rows,
        _pages,
        judge_throttle,
        _heat,
        _pcie,
        _mode,
        _driver_wants,
    )
    return [result for judge in judges for result in judge(gpu)]


def _ecc(gpu: GPU) -> Iterator[CheckResult]:
    if not gpu.reported & {"ecc_uncorrected", "ecc_corrected"}:
        return
    name, command = f"{gpu.label}.ecc", "nvidia-smi -q -d ECC"
    now = gpu.ecc_uncorrected
    if gpu.ecc_threshold_exceeded:
        message = "the card says that it has had too many memory errors (SRAM threshold)"
        yield checked(name, "fail", message, command=command, hint=_REPLACE)
    elif now is None and gpu.ecc_corrected:
        message = f"{gpu.ecc_corrected} corrected memory errors; uncorrected ones are not told"
        hint = "See `nvidia-smi -q -d ECC` on the machine"
        yield checked(name, "unknown", message, command=command, hint=hint)
    elif now is None:
        is_on = gpu.has_ecc is True
        message = "error correction is on, but its count is unknown (N/A is not 0)"
        if not is_on:
            message = "the card counts no memory errors (no ECC, or off): unknown, not 0"
        hint = "See `nvidia-smi -q -d ECC` on the machine"
        yield checked(name, "unknown" if is_on else "skipped", message, command=command, hint=hint)
    elif now:
        message = f"{now} uncorrected memory errors since the driver was loaded"
        yield checked(
            name, "fail", message, measured=str(now), limit="0", command=command, hint=_REPLACE
        )
    else:
        yield _corrected(gpu, name, command)


def _corrected(gpu: GPU, name: str, command: str) -> CheckResult:
    """A card without uncorrected errors now; the corrected ones are told, however few."""
    life, corrected = gpu.ecc_uncorrected_life, gpu.ecc_corrected or 0
    ever = gpu.ecc_corrected_life
    status: Status = "warn" if life or corrected >= MANY_CORRECTED else "pass"
    message = "no uncorrected memory errors"
    if life:
        message = f"{message} since the driver was loaded, but {life} in the card's life"
    if corrected or ever:
        in_life = f", {ever} in the card's life" if ever is not None else ""
        message = f"{message}; {count_of(corrected, 'corrected one')}{in_life}"
    return checked(
        name,
        status,
        message,
        measured=f"{corrected} corrected, {life or 0} uncorrected ever",
        limit="0 uncorrected",
        command=command,
        hint="Run `dcgmi diag -r 3` before a long run",
    )


def _rows(gpu: GPU) -> Iterator[CheckResult]:
    if not gpu.reported & {"remap_pending", "remap_failed"}:
        return
    name, command = f"{gpu.label}.remapped_rows", "nvidia-smi -q -d ROW_REMAPPER"
    if gpu.remap_failed:
        message = "a bad memory row could not be replaced"
        yield checked(name, "fail", message, command=command, hint=_REPLACE)
    elif gpu.remap_pending:
        message = "a bad memory row waits to be replaced: GPU reset needed before a long run"
        yield checked(
            name,
            "fail",
            message,
            measured="pending",
            limit="none pending",
            command=command,
            hint=_RESET,
        )
    elif gpu.remap_pending is None and gpu.remap_failed is None:
        message = "the card tells nothing of remapped rows: unknown, not 0"
        yield checked(name, "skipped", message, command=command)
    else:
        yield _remapped(gpu, name, command)


def _remapped(gpu: GPU, name: str, command: str) -> CheckResult:
    """Rows that were replaced and work: the more of them, the nearer the card's end."""
    corrected, lost = gpu.remapped_correctable or 0, gpu.remapped_uncorrectable or 0
    spares = gpu.banks_without_spares or 0
    message = (
        f"{count_of(corrected + lost, 'row')} replaced ({corrected} after corrected errors, "
        f"{lost} after uncorrectable ones), none waits to be"
    )
    if spares:
        message = f"{message}; few or no spare rows left in {count_of(spares, 'memory bank')}"
    return checked(
        name,
        "warn" if spares or lost else "pass",
        message,
        measured=str(corrected + lost),
        limit="0 after uncorrectable errors, and spare rows in every bank",
        command=command,
        hint="Run `dcgmi diag -r 3` before a long run; plan to replace the card",
    )


def _pages(gpu: GPU) -> Iterator[CheckResult]:
    name, command = f"{gpu.label}.retired_pages", "nvidia-smi -q -d PAGE_RETIREMENT"
    count = gpu.retired_pages
    if gpu.retire_pending:
        message = "a bad memory page waits to be retired: GPU reset or reboot needed first"
        yield checked(name, "fail", message, measured="pending", command=command, hint=_RESET)
    elif count is not None and count > 0:
        status: Status = "fail" if count >= MAX_RETIRED_PAGES else "warn"
        message = f"{count_of(count, 'memory page')} retired after double-bit errors"
        yield checked(
            name,
            status,
            message,
            measured=str(count),
            limit=f"< {MAX_RETIRED_PAGES}",
            command=command,
            hint=_REPLACE,
        )
    elif count == 0:
        yield checked(name, "pass", "no memory page is retired", measured="0", command=command)


def judge_throttle(gpu: GPU) -> Iterator[CheckResult]:
    """Reasons for which the card is slowed now; none where it cannot tell."""
    known = {name: getattr(gpu, name) for name in _SLOWED}
    if all(value is None for value in known.values()):
        return
    name, command = f"{gpu.label}.throttle", "nvidia-smi -q -d PERFORMANCE"
    active = next((_SLOWED[reason] for reason in _SLOWED if known[reason]), None)
    if active is None:
        yield checked(name, "pass", "nothing slows it down", command=command)
        return
    message, status = active
    hint = "Look at cooling, room and power cap; on a rented pod, take another one"
    yield checked(name, "fail" if status == "fail" else "warn", message, command=command, hint=hint)


def _heat(gpu: GPU) -> Iterator[CheckResult]:
    if gpu.temperature_c is None or gpu.slowdown_c is None:
        return
    status: Status = "pass" if gpu.temperature_c < gpu.slowdown_c else "fail"
    yield checked(
        f"{gpu.label}.heat",
        status,
        f"{gpu.temperature_c} C",
        measured=f"{gpu.temperature_c} C",
        limit=f"< {gpu.slowdown_c} C",
        command="nvidia-smi -q -d TEMPERATURE",
        hint="It slows down at this heat: look at cooling, or take another pod",
    )


def _pcie(gpu: GPU) -> Iterator[CheckResult]:
    """Lanes only: an idle card lowers its generation to save power, never its lanes for long."""
    now, best = gpu.pcie_width, gpu.pcie_width_max
    if now is None or best is None:
        return
    status: Status = "pass" if now >= best else "warn"
    generation = f", generation {gpu.pcie_generation}" if gpu.pcie_generation else ""
    yield checked(
        f"{gpu.label}.pcie",
        status,
        f"{now} of {best} PCIe lanes{generation}",
        measured=f"x{now}",
        limit=f"x{best}",
        command="nvidia-smi -q -d PCI",
        hint="Some slots have fewer lanes by design; else reseat the card or take another pod",
    )


def _mode(gpu: GPU) -> Iterator[CheckResult]:
    mode = gpu.compute_mode.lower()
    if "prohibited" in mode:
        message = "no program may compute on it (compute mode Prohibited)"
        hint = "Run `nvidia-smi -c DEFAULT` as root, or take another pod"
        yield checked(f"{gpu.label}.mode", "fail", message, command="nvidia-smi -q", hint=hint)


def _driver_wants(gpu: GPU) -> Iterator[CheckResult]:
    action = gpu.recovery_action
    if gpu.reset_required or (action and action.lower() != "none"):
        message = f"the driver wants a recovery action: {action or 'reset required'}"
        yield checked(
            f"{gpu.label}.recovery", "fail", message, command="nvidia-smi -q", hint=_RESET
        )
    if gpu.fabric_state.lower() in {"in progress", "not started"}:
        message = f"the NVSwitch fabric is not ready ({gpu.fabric_state})"
        hint = "Start `nvidia-fabricmanager` on the host and wait until the state is Completed"
        yield checked(f"{gpu.label}.fabric", "fail", message, command="nvidia-smi -q", hint=hint)
