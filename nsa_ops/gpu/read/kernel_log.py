"""Troubles of cards in a kernel log (dmesg, kmsg, journal): Xid, NVSwitch and driver messages."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from nsa_ops.gpu.read.readings import parse_bus

Trouble = Literal[
    "xid",
    "switch",
    "start",
    "lost",
    "mismatch",
    "hung",
    "iommu",
    "pcie",
    "unsupported",
    "firmware",
    "collective",
    "host_memory",
]
#: The kernel itself breaks lines at about this length.
_MAX_LINE = 1000
_STAMP = re.compile(
    r"^(?:<\d+>|\w+ *:\w+ *:)?\s*(?:\[\s*\d+\.\d+\]|\[\w{3} \w{3} +\d+ [\d:]+ \d{4}\]|"
    r"\d+,\d+,\d+,[-c+]|"
    r"\[\w{3} +\d+ \d{4} [\d:]+\] \[\w+\]|\w{3} +\d+ [\d:]+ \S+ kernel:|"
    r"\d{4}-\d\d-\d\dT[\d:.,]+\S*(?: \S+ kernel:)?|NVRM: )"
)
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]+)[^)]*\):\s*(\d+)(?:,\s*(.*))?")
_SXID = re.compile(r"SXid \((?:PCI:)?([0-9A-Fa-f:.]+)\):\s*(\d+),?\s*(.*)")
_FABRIC = re.compile(
    r"NVSwitch ((?:non-)?fatal) error (\d+).*?bus id ([0-9A-Fa-f:.]+)", re.IGNORECASE
)
_PROCESS = re.compile(r"\bname=([^,<]+)")
_GPU_NUMBER = re.compile(r"\bGPU(\d+) GSP|from GPU(\d+)\b")
_MODULE = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+\.\d+(?:\.\d+)?)")
_MISMATCH = re.compile(r"NVRM: API mismatch")
_VERSION = re.compile(r"version (\d+\.\d+(?:\.\d+)?)")
_NO_ACTION = re.compile(r"Recovery action changed.*\bto\b.*\(None\)", re.IGNORECASE)
_OTHERS: tuple[tuple[Trouble, re.Pattern[str]], ...] = (
    ("collective", re.compile(r"segfault at .* in libnccl")),
    ("host_memory", re.compile(r"Out of memory: Kill(?:ed)? process|oom-kill:")),
    (
        "firmware",
        re.compile(
            r"(?:NVRM|nvidia).*(Cannot initialize GSP firmware|GFW_BOOT|GFW boot"
            r"|failed to load firmware)",
            re.IGNORECASE,
        ),
    ),
    (
        "start",
        re.compile(
            r"(?:NVRM|nvidia).*(RmInitAdapter|rm_init_adapter|probe of \S+ failed"
            r"|probe routine failed|No NVIDIA GPU found|nvidia_open|GPU has failed)",
            re.IGNORECASE,
        ),
    ),
    (
        "lost",
        re.compile(
            r"NVRM.*(fallen off the bus|GPU is lost|GPU crash dump|GPU lost from the bus)",
            re.IGNORECASE,
        ),
    ),
    (
        "unsupported",
        re.compile(
            r"NVRM.*(not supported by the NVIDIA"
            r"|PCI I/O region assigned to your NVIDIA device is invalid|is not supported by open)",
            re.IGNORECASE,
        ),
    ),
    (
        "hung",
        re.compile(
            r"task (?:nvidia|nv_|python|cuda"
            r"|irq/\d+-nvidia)\S* blocked for more than \d+ seconds|NVRM.*GPU.*(?:is|seems) hung",
            re.IGNORECASE,
        ),
    ),
    ("iommu", re.compile(r"AMD-Vi:.*IO_PAGE_FAULT|DMAR:.*fault addr|DMAR:.*\[DMA (?:Read|Write)")),
    (
        "pcie",
        re.compile(r"AER:.*Uncorrect|PCIe Bus Error: severity=Uncorrect|DPC: containment event"),
    ),
)


@dataclass(frozen=True)
class Event:
    """One kind of trouble of one card, however often it was logged.

    Attributes:
        kind: What sort.
        bus: The card's PCI address; empty if the line names none.
        code: Xid or SXid; None for other lines.
        count: Lines.
        text: The first of them, without its time.
        programs: Names of programs that were on the card.
        gpu: The driver's number of the card; None if not told.
        is_limited: The driver says that it left further lines out.
    """

    kind: Trouble
    bus: str
    code: int | None
    count: int
    text: str
    programs: tuple[str, ...] = ()
    gpu: int | None = None
    is_limited: bool = False


@dataclass(frozen=True)
class KernelLog:
    """What a kernel log says of the cards.

    Attributes:
        num_lines: Lines of a kernel log's form.
        events: Troubles, in the order they first came.
        module_version: Version of the loaded driver module; empty if not told.
        client_version: Version of a library that did not fit it; empty if none.
    """

    num_lines: int = 0
    events: tuple[Event, ...] = ()
    module_version: str = ""
    client_version: str = ""


def parse_kernel_log(text: str) -> KernelLog:
    """Troubles in a kernel log; everything else is noise."""
    groups: dict[tuple[Trouble, str, int | None], Event] = {}
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


def _events(line: str) -> Iterator[Event]:
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
        yield Event("switch", parse_bus(fabric[3]), int(fabric[2]), 1, text)
        return
    for kind, pattern in _OTHERS:
        if pattern.search(line):
            yield Event(kind, parse_bus(line), None, 1, _plain(line))
            return


def _coded(kind: Trouble, found: re.Match[str], line: str) -> Event:
    address, code, _ = found.groups()
    program, number = _PROCESS.search(line), _GPU_NUMBER.search(line)
    return Event(
        kind=kind,
        bus=parse_bus(address) or address.lower(),
        code=int(code),
        count=1,
        text=_plain(line),
        programs=(program[1].strip(),) if program else (),
        gpu=int(number[1] or number[2]) if number else None,
    )


def _grown(event: Event, newer: Event) -> Event:
    programs = tuple(dict.fromkeys((*event.programs, *newer.programs)))
    gpu = event.gpu if event.gpu is not None else newer.gpu
    return replace(event, count=event.count + 1, programs=programs, gpu=gpu)


def _plain(line: str) -> str:
    """A line without its time and with no more than a reader wants."""
    return _STAMP.sub(lambda stamp: "NVRM: " if "NVRM" in stamp[0] else "", line).lstrip(" ;")[:200]
