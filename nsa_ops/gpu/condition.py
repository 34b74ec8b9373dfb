"""Judge one card's condition: memory errors, spare rows, heat, PCIe, what the driver asks for."""

from collections.abc import Iterator, Mapping
from functools import partial

from nsa_core.rundir.report import CheckResult, Status, checked
from nsa_ops.gpu.card import GPU
from nsa_ops.quantities import count_of

#: NVIDIA replaces boards of before Ampere at 60 retired pages.
MAX_RETIRED_PAGES = 60
#: Corrected errors do no harm one by one; this many since boot means a bad cell that is read often.
MANY_CORRECTED = 1000
_RESET = "Reset the card (`nvidia-smi --gpu-reset`), reboot, or take another pod"
_REPLACE = "Take another card; this one corrupts memory"
_DIAGNOSE = "Run `dcgmi diag -r 3` before a long run"
#: Reasons for a lowered clock, the most serious first.
_SLOWED: Mapping[str, tuple[Status, str]] = {
    "hw_thermal": ("fail", "the hardware slows the card down because it is too hot"),
    "hw_power_brake": ("fail", "the hardware slows the card down because of its power supply"),
    "hw_slowdown": ("fail", "the hardware slows the card down (heat or power)"),
    "sw_thermal": ("warn", "the driver slows the card down because it is hot"),
}


def judge_condition(gpu: GPU) -> list[CheckResult]:
    """Every check on the card's condition that its values allow."""
    judges = (_ecc, _rows, _pages, judge_throttle, _heat, _pcie, _driver_wants)
    return [result for judge in judges for result in judge(gpu)]


def _ecc(gpu: GPU) -> Iterator[CheckResult]:
    if not gpu.reported & {"ecc_uncorrected", "ecc_corrected"}:
        return
    ecc = partial(checked, f"{gpu.label}.ecc", command="nvidia-smi -q -d ECC")
    hint, now = "See `nvidia-smi -q -d ECC` on the machine", gpu.ecc_uncorrected
    if gpu.ecc_threshold_exceeded:
        message = "the card itself reports too many memory errors (SRAM threshold)"
        yield ecc("fail", message, hint=_REPLACE)
    elif now is None and gpu.ecc_corrected:
        message = f"{gpu.ecc_corrected} corrected memory errors; uncorrected ones are not reported"
        yield ecc("unknown", message, hint=hint)
    elif now is None and gpu.has_ecc:
        message = "error correction is on, but its count is unknown (N/A is not 0)"
        yield ecc("unknown", message, hint=hint)
    elif now is None:
        message = "the card counts no memory errors (no ECC, or off): unknown, not 0"
        yield ecc("skipped", message)
    elif now:
        message = f"{now} uncorrected memory errors since the driver was loaded"
        yield ecc("fail", message, measured=str(now), limit="0", hint=_REPLACE)
    else:
        life, corrected, ever = (
            gpu.ecc_uncorrected_life, gpu.ecc_corrected or 0, gpu.ecc_corrected_life
        )  # fmt: skip
        message = "no uncorrected memory errors"
        if life:
            message += f" since the driver was loaded, but {life} in the card's life"
        if corrected or ever:
            in_life = f", {ever} in the card's life" if ever is not None else ""
            message += f"; {count_of(corrected, 'corrected one')}{in_life}"
        measured = f"{corrected} corrected, {life or 0} uncorrected ever"
        is_worn = life or corrected >= MANY_CORRECTED
        yield ecc(
            "warn" if is_worn else "pass", message, measured=measured, limit="0 uncorrected",
            hint=_DIAGNOSE,
        )  # fmt: skip


def _rows(gpu: GPU) -> Iterator[CheckResult]:
    """Memory rows that spare ones replaced: the more of them, the nearer the card's end."""
    if not gpu.reported & {"remap_pending", "remap_failed"}:
        return
    rows = partial(checked, f"{gpu.label}.remapped_rows", command="nvidia-smi -q -d ROW_REMAPPER")
    if gpu.remap_failed:
        yield rows("fail", "a bad memory row could not be replaced", hint=_REPLACE)
        return
    if gpu.remap_pending:
        message = "a bad memory row waits to be replaced: GPU reset needed before a long run"
        yield rows("fail", message, measured="pending", limit="none pending", hint=_RESET)
        return
    if gpu.remap_pending is None and gpu.remap_failed is None:
        yield rows("skipped", "the card does not report replaced memory rows: unknown, not 0")
        return
    corrected, lost = gpu.remapped_correctable or 0, gpu.remapped_uncorrectable or 0
    message = (
        f"{count_of(corrected + lost, 'row')} replaced ({corrected} after corrected errors, "
        f"{lost} after uncorrectable ones), none is waiting"
    )
    if spares := gpu.banks_without_spares or 0:
        message += f"; few or no spare rows left in {count_of(spares, 'memory bank')}"
    yield rows(
        "warn" if spares or lost else "pass", message, measured=str(corrected + lost),
        limit="0 after uncorrectable errors, and spare rows in every bank",
        hint=f"{_DIAGNOSE}; plan to replace the card",
    )  # fmt: skip


def _pages(gpu: GPU) -> Iterator[CheckResult]:
    command, count = "nvidia-smi -q -d PAGE_RETIREMENT", gpu.retired_pages
    pages = partial(checked, f"{gpu.label}.retired_pages", command=command)
    if gpu.retire_pending:
        message = "a bad memory page waits to be retired: GPU reset or reboot needed first"
        yield pages("fail", message, measured="pending", hint=_RESET)
    elif count is not None and count > 0:
        message = f"{count_of(count, 'memory page')} retired after double-bit errors"
        yield pages(
            "fail" if count >= MAX_RETIRED_PAGES else "warn", message, measured=str(count),
            limit=f"< {MAX_RETIRED_PAGES}", hint=_REPLACE,
        )  # fmt: skip
    elif count == 0:
        yield pages("pass", "no memory page is retired", measured="0")


def judge_throttle(gpu: GPU) -> Iterator[CheckResult]:
    """Why the card is slowed down now; nothing where that is unknown."""
    known = {reason: getattr(gpu, reason) for reason in _SLOWED}
    if all(value is None for value in known.values()):
        return
    active = [_SLOWED[reason] for reason in _SLOWED if known[reason]]
    status, message = active[0] if active else ("pass", "nothing slows the card down")
    yield checked(
        f"{gpu.label}.throttle", status, message, command="nvidia-smi -q -d PERFORMANCE",
        hint="Check the cooling, the room and the power limit; on a rented pod, take another one",
    )  # fmt: skip


def _heat(gpu: GPU) -> Iterator[CheckResult]:
    if gpu.temperature_c is None or gpu.slowdown_c is None:
        return
    measured = f"{gpu.temperature_c} C"
    yield checked(
        f"{gpu.label}.heat", "pass" if gpu.temperature_c < gpu.slowdown_c else "fail", measured,
        measured=measured, limit=f"< {gpu.slowdown_c} C", command="nvidia-smi -q -d TEMPERATURE",
        hint="The card slows itself down at this temperature: check the cooling, or take another "
        "pod",
    )  # fmt: skip


def _pcie(gpu: GPU) -> Iterator[CheckResult]:
    """Lanes only: an idle card lowers its generation to save power, never its lanes for long."""
    now, best = gpu.pcie_width, gpu.pcie_width_max
    if now is None or best is None:
        return
    generation = f", generation {gpu.pcie_generation}" if gpu.pcie_generation else ""
    yield checked(
        f"{gpu.label}.pcie", "pass" if now >= best else "warn",
        f"{now} of {best} PCIe lanes{generation}", measured=f"x{now}", limit=f"x{best}",
        command="nvidia-smi -q -d PCI",
        hint="Some slots have fewer lanes by design; else reseat the card or take another pod",
    )  # fmt: skip


def _driver_wants(gpu: GPU) -> Iterator[CheckResult]:
    """Modes and requests of the driver in which no program may start."""
    action = gpu.recovery_action
    failed = partial(checked, status="fail", command="nvidia-smi -q")
    if "prohibited" in gpu.compute_mode.lower():
        yield failed(
            f"{gpu.label}.mode",
            message="no program may compute on it (compute mode Prohibited)",
            hint="Run `nvidia-smi -c DEFAULT` as root, or take another pod",
        )
    if gpu.reset_required or (action and action.lower() != "none"):
        message = f"the driver asks for a recovery action: {action or 'reset required'}"
        yield failed(f"{gpu.label}.recovery", message=message, hint=_RESET)
    if gpu.fabric_state.lower() in {"in progress", "not started"}:
        yield failed(
            f"{gpu.label}.fabric",
            message=f"the NVSwitch fabric is not ready ({gpu.fabric_state})",
            hint="Start `nvidia-fabricmanager` on the host and wait until the state is Completed",
        )
