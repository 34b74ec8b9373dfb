"""Errors of cards in a kernel log (dmesg, kmsg, journal), what they mean and what to do."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from nsa_core.rundir.report import CheckResult, Status, checked
from nsa_ops.gpu.card import GPU
from nsa_ops.gpu.smi_fields import parse_bus
from nsa_ops.gpu.xids import explain_xid
from nsa_ops.quantities import count_of

Trouble = Literal[
    "xid", "switch", "start", "lost", "hung", "iommu", "pcie", "unsupported",
    "firmware", "collective", "host_memory",
]  # fmt: skip
#: The kernel itself breaks lines at about this length.
_MAX_LINE = 1000
_STAMP = re.compile(
    r"^(?:<\d+>|\w+ *:\w+ *:)?\s*(?:\[\s*\d+\.\d+\]|\[\w{3} \w{3} +\d+ [\d:]+ \d{4}\]|"
    r"\d+,\d+,\d+,[-c+]|"
    r"\[\w{3} +\d+ \d{4} [\d:]+\] \[\w+\]|\w{3} +\d+ [\d:]+ \S+ kernel:|"
    r"\d{4}-\d\d-\d\dT[\d:.,]+\S*(?: \S+ kernel:)?|NVRM: )"
)
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]+)[^)]*\):\s*(\d{1,9})(?:,\s*(.*))?")
_SXID = re.compile(r"SXid \((?:PCI:)?([0-9A-Fa-f:.]+)\):\s*(\d{1,9}),?\s*(.*)")
_FABRIC = re.compile(
    r"NVSwitch ((?:non-)?fatal) error (\d{1,9}).*?bus id ([0-9A-Fa-f:.]+)", re.IGNORECASE
)
_PROCESS = re.compile(r"\bname=([^,<]+)")
_GPU_NUMBER = re.compile(r"\bGPU(\d{1,9}) GSP|from GPU(\d{1,9})\b")
_MODULE = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+\.\d+(?:\.\d+)?)")
_MISMATCH = re.compile(r"NVRM: API mismatch")
_VERSION = re.compile(r"version (\d+\.\d+(?:\.\d+)?)")
_NO_ACTION = re.compile(r"Recovery action changed.*\bto\b.*\(None\)", re.IGNORECASE)
COMMAND = "dmesg -T | grep -iE 'nvrm|xid'"
_REBOOT = "Reboot the machine or reset the card; on a rented pod, take another one"


@dataclass(frozen=True)
class _KnownLine:
    """A line without a code: how it is recognised, what it means and what to do."""

    kind: Trouble
    pattern: str
    meaning: str
    advice: str = _REBOOT
    status: Status = "fail"


_KNOWN_LINES = tuple(
    (re.compile(one.pattern, re.IGNORECASE), one)
    for one in (
        _KnownLine(
            "collective", r"(?-i:segfault at .* in libnccl)", "a program crashed inside NCCL",
            "Update NCCL with torch, and see its own log", "warn",
        ),
        _KnownLine(
            "host_memory", r"(?-i:Out of memory: Kill(?:ed)? process|oom-kill:)",
            "the machine ran out of its own memory and killed a program",
            "Use fewer data workers, or a pod with more RAM", "warn",
        ),
        _KnownLine(
            "firmware",
            r"(?:NVRM|nvidia).*(Cannot initialize GSP firmware|GFW_BOOT|GFW boot"
            r"|failed to load firmware)",
            "the driver cannot start the card's own processor (GSP firmware)",
        ),
        _KnownLine(
            "start",
            r"(?:NVRM|nvidia).*(RmInitAdapter|rm_init_adapter|probe of \S+ failed"
            r"|probe routine failed|No NVIDIA GPU found|nvidia_open|GPU has failed)",
            "the card is on the bus, but the driver cannot start it",
        ),
        _KnownLine(
            "lost",
            r"NVRM.*(fallen off the bus|GPU is lost|GPU crash dump|GPU lost from the bus)",
            "the card has fallen off the bus (PCIe link, power or heat)",
        ),
        _KnownLine(
            "unsupported",
            r"NVRM.*(not supported by the NVIDIA"
            r"|PCI I/O region assigned to your NVIDIA device is invalid|is not supported by open)",
            "the driver does not support this card", "Install the driver branch that does",
        ),
        _KnownLine(
            "hung",
            r"task (?:nvidia|nv_|python|cuda"
            r"|irq/\d+-nvidia)\S* blocked for more than \d+ seconds|NVRM.*GPU.*(?:is|seems) hung",
            "a program that uses the card is stuck in the kernel",
        ),
        _KnownLine(
            "iommu", r"(?-i:AMD-Vi:.*IO_PAGE_FAULT|DMAR:.*fault addr|DMAR:.*\[DMA (?:Read|Write))",
            "the IOMMU blocked a transfer between devices",
            "Set NCCL_P2P_DISABLE=1 for several cards, or boot with iommu=pt and ACS off",
            "warn",
        ),
        _KnownLine(
            "pcie",
            r"(?-i:AER:.*Uncorrect|PCIe Bus Error: severity=Uncorrect|DPC: containment event)",
            "uncorrected PCIe error", "Reseat the card, or take another pod if it comes back",
            "warn",
        ),
    )
)  # fmt: skip
_BY_KIND = {one.kind: one for _, one in _KNOWN_LINES}


@dataclass(frozen=True)
class DriverEvent:
    """One kind of error of one card, however often it was logged."""

    kind: Trouble
    bus: str  # PCI address of the card; empty if the line names none
    code: int | None  # Xid or SXid; None for other lines
    count: int  # lines
    text: str  # the first of them, without its time
    programs: tuple[str, ...] = ()  # that were on the card
    gpu: int | None = None  # the driver's number of the card
    is_limited: bool = False  # the driver says that it left further lines out


@dataclass(frozen=True)
class KernelLog:
    """What a kernel log says of the cards."""

    num_lines: int = 0  # in the form of a kernel log
    events: tuple[DriverEvent, ...] = ()  # in the order they first came
    module_version: str = ""  # of the loaded driver
    client_version: str = ""  # of a library that did not fit it


def parse_kernel_log(text: str) -> KernelLog:
    """Errors of cards in a kernel log; everything else is ignored."""
    groups: dict[tuple[Trouble, str, int | None], DriverEvent] = {}
    num_lines, module, client, in_mismatch, limited = 0, "", "", False, set()
    for whole in text.splitlines():
        line = whole[:_MAX_LINE]
        num_lines += _STAMP.match(line) is not None
        loaded = _MODULE.search(line)
        module = loaded[1] if loaded else module
        in_mismatch = in_mismatch or _MISMATCH.search(line) is not None
        version = _VERSION.search(line) if in_mismatch else None
        if version and "client" in line:
            client = version[1]
        elif version and "module" in line:
            module = module or version[1]
        if "Rate limiting" in line:
            limited.add(parse_bus(line))
        for event in _events(line):
            key = (event.kind, event.bus, event.code)
            groups[key] = _grown(groups[key], event) if key in groups else event
    both = re.search(
        r"client has the version ([\d.]*\d).*?module has the version ([\d.]*\d)", text, re.DOTALL
    )
    if both:
        client, module = both.groups()
    events = [replace(one, is_limited=one.bus in limited) for one in groups.values()]
    return KernelLog(num_lines, tuple(events), module, client if in_mismatch else "")


def _events(line: str) -> Iterator[DriverEvent]:
    xid, switch = _XID.search(line), _SXID.search(line)
    if xid:
        if not (int(xid[2]) == 154 and _NO_ACTION.search(line)):
            yield _coded("xid", xid, line)
        return
    if switch:
        yield _coded("switch", switch, line)
        return
    fabric = _FABRIC.search(line)
    if fabric:
        text = f"{fabric[1].capitalize()}: {_plain(line)}"
        yield DriverEvent("switch", parse_bus(fabric[3]), int(fabric[2]), 1, text)
        return
    for pattern, known in _KNOWN_LINES:
        if pattern.search(line):
            yield DriverEvent(known.kind, parse_bus(line), None, 1, _plain(line))
            return


def _coded(kind: Trouble, found: re.Match[str], line: str) -> DriverEvent:
    address, code, _ = found.groups()
    program, number = _PROCESS.search(line), _GPU_NUMBER.search(line)
    return DriverEvent(
        kind=kind,
        bus=parse_bus(address) or address.lower(),
        code=int(code),
        count=1,
        text=_plain(line),
        programs=(program[1].strip(),) if program else (),
        gpu=int(number[1] or number[2]) if number else None,
    )


def _grown(event: DriverEvent, newer: DriverEvent) -> DriverEvent:
    programs = tuple(dict.fromkeys((*event.programs, *newer.programs)))
    gpu = event.gpu if event.gpu is not None else newer.gpu
    return replace(event, count=event.count + 1, programs=programs, gpu=gpu)


def _plain(line: str) -> str:
    """A line without its time, of at most 200 characters."""
    return _STAMP.sub(lambda stamp: "NVRM: " if "NVRM" in stamp[0] else "", line).lstrip(" ;")[:200]


def judge_kernel_log(log: KernelLog, cards: Sequence[GPU] = ()) -> list[CheckResult]:
    """One finding for each card and kind of error, or one that says that there is none.

    Args:
        log: What was read.
        cards: Cards that are known, to name them by their numbers.
    """
    if not log.events:
        if not log.num_lines:
            return []
        message = f"{count_of(log.num_lines, 'line')}, no errors of a card among them"
        return [checked("kernel.log", "pass", message, command=COMMAND)]
    numbers = {event.bus: event.gpu for event in log.events if event.gpu is not None}
    numbers |= {card.bus: card.index for card in cards if card.bus and card.index is not None}
    return [_judge(event, numbers.get(event.bus)) for event in log.events]


def _judge(event: DriverEvent, number: int | None) -> CheckResult:
    label = GPU(index=number, bus=event.bus).label
    where = event.bus or "an unnamed card"
    where += f" (GPU{number})" if number is not None else ""
    times = f"{event.count} {'time' if event.count == 1 else 'times'}"
    times += ", and more that the driver did not print" if event.is_limited else ""
    status: Status
    name, limit = f"{label}.{event.kind}", "none since boot"
    if event.kind == "xid":
        known = explain_xid(event.code or 0)
        programs = f"; seen by {', '.join(event.programs[:4])}" if event.programs else ""
        detail = f" ({event.text})" if known.needs_text else ""
        name, status, hint = f"{name}{event.code}", known.status, known.advice
        message = f"Xid {event.code} on {where}, {times}: {known.meaning}{detail}{programs}"
    elif event.kind == "switch":
        is_harmless = "non-fatal" in event.text.lower()
        name = f"{label.replace('gpu', 'switch')}.sxid{event.code}"
        status, word = ("warn", "non-fatal") if is_harmless else ("fail", "fatal")
        message = f"{word} NVSwitch error, SXid {event.code} on {where}, {times}: {event.text}"
        hint = "Reset all cards together or reboot; restart the fabric manager; nvidia-smi may hang"
    else:
        line = _BY_KIND[event.kind]
        status, hint, limit = line.status, line.advice, "none"
        message = f"{where}: {line.meaning} ({times}): {event.text}"
    return checked(name, status, message, measured=times, limit=limit, command=COMMAND, hint=hint)
