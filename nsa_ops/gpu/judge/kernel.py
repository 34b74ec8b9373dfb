"""Judge a kernel log: one finding a card and code, with its meaning and what to do."""

from collections.abc import Mapping, Sequence

from nsa_core.rundir.report import CheckResult
from nsa_ops.gpu.card import GPU
from nsa_ops.gpu.judge.result import checked
from nsa_ops.gpu.read.kernel_log import Event, KernelLog, Trouble
from nsa_ops.gpu.xids import explain_xid
from nsa_ops.quantities import count_of

COMMAND = "dmesg -T | grep -iE 'nvrm|xid'"
_REBOOT = "Reboot the machine or reset the card; on a rented pod, take another one"
#: What other lines mean and what to do; `warn` where a run may still go well.
_MEANINGS: Mapping[Trouble, tuple[str, str]] = {
    "start": ("the card is on the bus, but the driver cannot start it", _REBOOT),
    "firmware": ("the driver cannot start the card's own processor (GSP firmware)", _REBOOT),
    "lost": ("the card has fallen off the bus (PCIe link, power or heat)", _REBOOT),
    "unsupported": ("the driver does not serve this card", "Install the driver branch that does"),
    "hung": ("a program that uses the card is stuck in the kernel", _REBOOT),
    "iommu": (
        "the IOMMU blocked a transfer between devices",
        "Set NCCL_P2P_DISABLE=1 for several cards, or boot with iommu=pt and ACS off",
    ),
    "collective": ("a program crashed inside NCCL", "Update NCCL with torch, and see its own log"),
    "host_memory": (
        "the machine ran out of its own memory and killed a program",
        "Use fewer data workers, or a pod with more RAM",
    ),
    "pcie": ("uncorrected PCIe error", "Reseat the card, or take another pod if it comes back"),
}
_WARNINGS = frozenset({"iommu", "pcie", "collective", "host_memory"})


def judge_kernel_log(log: KernelLog, cards: Sequence[GPU] = ()) -> list[CheckResult]:
    """Findings of a log, or that it holds none.

    Args:
        log: What was read.
        cards: Cards that are known, to name them by their numbers.
    """
    if not log.events:
        if not log.num_lines:
            return []
        message = f"{count_of(log.num_lines, 'line')}, and no trouble of a card in them"
        return [checked("kernel.log", "pass", message, command=COMMAND)]
    numbers = {event.bus: event.gpu for event in log.events if event.gpu is not None}
    numbers |= {card.bus: card.index for card in cards if card.bus and card.index is not None}
    return [_judge(event, numbers.get(event.bus)) for event in log.events]


def _judge(event: Event, number: int | None) -> CheckResult:
    label = f"gpu{number}" if number is not None else _address(event.bus)
    where = " ".join(
        [
            event.bus or "a card that is not named",
            *([f"(GPU{number})"] if number is not None else []),
        ]
    )
    if event.kind == "xid":
        return _judge_xid(event, label, where)
    if event.kind == "switch":
        return _judge_switch(event, label, where)
    meaning, advice = _MEANINGS[event.kind]
    return checked(
        f"{label}.{event.kind}", "warn" if event.kind in _WARNINGS else "fail",
        f"{where}: {meaning} ({_times(event)}): {event.text}",
        measured=_times(event), limit="none", command=COMMAND, hint=advice,
    )  # fmt: skip


def _address(bus: str) -> str:
    return f"gpu@{bus.partition(':')[2]}" if bus else "gpu?"


def _times(event: Event) -> str:
    more = ", and more that the driver did not print" if event.is_limited else ""
    return f"{event.count} {'time' if event.count == 1 else 'times'}{more}"


def _judge_xid(event: Event, label: str, where: str) -> CheckResult:
    known = explain_xid(event.code or 0)
    programs = f"; seen by {', '.join(event.programs[:4])}" if event.programs else ""
    detail = (
        f" ({event.text})" if known.meaning.startswith(("not a code", "the driver asks")) else ""
    )
    return checked(
        f"{label}.xid{event.code}", known.status,
        f"Xid {event.code} on {where}, {_times(event)}: {known.meaning}{detail}{programs}",
        measured=_times(event), limit="none since boot", command=COMMAND, hint=known.advice,
    )  # fmt: skip


def _judge_switch(event: Event, label: str, where: str) -> CheckResult:
    is_harmless = "non-fatal" in event.text.lower()
    word = "non-fatal" if is_harmless else "fatal"
    return checked(
        f"{label.replace('gpu', 'switch')}.sxid{event.code}", "warn" if is_harmless else "fail",
        f"{word} NVSwitch error, SXid {event.code} on {where}, {_times(event)}: {event.text}",
        measured=_times(event), limit="none since boot", command=COMMAND,
        hint="Reset all cards together or reboot; restart the fabric manager; nvidia-smi may hang",
    )  # fmt: skip
