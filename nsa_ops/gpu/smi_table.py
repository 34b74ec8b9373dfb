"""Cards from the table of plain `nvidia-smi`, its lists (`-L`, `mig`), and from CUDA programs."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from nsa_ops.gpu.card import GPU, Process, Slice, join_cards
from nsa_ops.gpu.smi_fields import parse_bus, parse_count, parse_flag, parse_number, parse_text

_VERSIONS = re.compile(
    r"(?:NVIDIA-SMI\s+(?P<tool>[\d.]+)\s+)?Driver Version:\s*(?P<driver>[\d.]+)"
    r"(?:.*?CUDA Version:\s*(?P<cuda>[\d.]+))?"
)
_FIRST = re.compile(
    r"^\|\s+(\d+)\s+(\S.*?)\s+(On|Off|N/A|ERR!|WDDM|TCC|MCDM)"
    r"\s*\|\s*([0-9A-Fa-f:.]{7,16})\s+(\S+)\s*\|\s*(.*?)\s*\|"
)
_SECOND = re.compile(
    r"^\|\s*(?P<fan>\d+\s*%|N/A|ERR!)\s+(?P<temperature>\S+)\s+(?P<state>P\d+|N/A|ERR!|Unknown)\s+"
    r"(?P<power>.*?)\s*/\s*(?P<limit>.*?)\s*\|\s*(?P<used>\S+)\s*/\s*(?P<total>\S+)\s*\|"
    r"\s*(?P<load>\S+)\s+(?P<mode>.*?)\s*\|"
)
_THIRD = re.compile(r"^\|\s*\|\s*\|\s*(Enabled\*?|Disabled\*?|N/A)\s*\|\s*$")
_PROCESS = re.compile(
    r"^\|\s+(\d+)\s+(?:(?:\d+|N/A)\s+(?:\d+"
    r"|N/A)\s+)?(\d+)\s+([CGM](?:\+[CGM])*)\s+(.*?)\s+(\d+MiB|N/A)\s*\|"
)
_SLICE = re.compile(r"^\|\s+(\d+)\s+\d+\s+\d+\s+\d+\s+\|\s*(\d+)MiB\s*/\s*(\d+)MiB\s*\|\s*(\d+)?")
_LISTED = re.compile(r"^\s*GPU (\d+): (.+?)(?: \(UUID: ([^)]*)\)?)?\s*$")
_LISTED_SLICE = re.compile(r"^\s+MIG (\S+)\s+Device\s+\d+:")
_LISTED_INSTANCE = re.compile(r"^\|\s+(\d+)\s+MIG (\S+)\s+\d+\s+\d+\s+\d+:\d+\s*\|")
_SLICE_PROFILE = re.compile(r"^\|\s+(\d+)\s+MIG \S+\s+\d+\s+\d+/\d+\s")
_SLICE_GB = re.compile(r"\.(\d+)gb", re.IGNORECASE)
_DETAILS = frozenset(
    {"temperature_c", "power_w", "power_limit_w", "memory_mib", "memory_used_mib",
     "utilization_percent", "fan_percent", "compute_mode"}
)  # fmt: skip
_BAD = "ERR!"
_MODELS = frozenset({"WDDM", "TCC", "MCDM"})
_PROPERTIES = re.compile(
    r"_CudaDeviceProperties\(name='([^']*)', major=(\d+), minor=(\d+), total_memory=(\d+)MB"
)
_CUDA_DEVICE = re.compile(r'^Device (\d+): "([^"]*)"', re.MULTILINE)
_CUDA_CAPABILITY = re.compile(r"CUDA Capability Major/Minor version number:\s*(\d+)\.(\d+)")
_CUDA_MEMORY = re.compile(r"Total amount of global memory:\s*(\d+) MBytes")
_CUDA_KNOWN = frozenset({"name", "compute_capability", "memory_mib"})


def parse_table(text: str) -> tuple[GPU, ...]:
    """Cards from the drawn table; processes are joined to them."""
    cards: list[GPU] = []
    extras: list[GPU] = []
    heading: re.Match[str] | None = None
    for line in text.splitlines():
        heading = _VERSIONS.search(line) or heading
        if first := _FIRST.match(line):
            cards.append(_first(first, heading))
        elif cards and (second := _SECOND.match(line)):
            cards[-1] = _second(cards[-1], second)
        elif cards and (third := _THIRD.match(line)):
            cards[-1] = _third(cards[-1], third)
        else:
            extras += _extras(line)
    return join_cards([*cards, *_gathered(extras)]) if cards else ()


def _first(found: re.Match[str], heading: re.Match[str] | None) -> GPU:
    index, name, mode, bus, display, ecc = found.groups()
    return GPU(
        index=int(index),
        name=parse_text(name),
        bus=parse_bus(bus if bus.count(":") > 1 else f"0000:{bus}"),
        driver_model=mode if mode in _MODELS else "",
        is_persistent=parse_flag(mode),
        has_display=parse_flag(display),
        ecc_uncorrected=parse_count(ecc),
        has_ecc=None if parse_count(ecc) is None else True,
        answers_badly=_BAD in found[0],
        reported=frozenset({"name"} if ecc == "On" else {"name", "ecc_uncorrected", "has_ecc"}),
        tool_version=(heading and heading["tool"]) or "",
        driver_version=(heading and heading["driver"]) or "",
        cuda_version=(heading and heading["cuda"]) or "",
    )


def _second(card: GPU, found: re.Match[str]) -> GPU:
    return replace(
        card,
        fan_percent=parse_count(found["fan"]),
        temperature_c=parse_count(found["temperature"]),
        power_w=parse_number(found["power"]),
        power_limit_w=parse_number(found["limit"]),
        memory_used_mib=parse_count(found["used"]),
        memory_mib=parse_count(found["total"]),
        utilization_percent=parse_count(found["load"]),
        compute_mode=parse_text(found["mode"]),
        answers_badly=card.answers_badly or _BAD in found.string,
        reported=card.reported | _DETAILS,
    )


def _third(card: GPU, found: re.Match[str]) -> GPU:
    mode = parse_flag(found[1].rstrip("*"))
    pending = not mode if mode is not None and found[1].endswith("*") else mode
    known = frozenset({"is_mig", "is_mig_pending"})
    return replace(card, is_mig=mode, is_mig_pending=pending, reported=card.reported | known)


def _extras(line: str) -> Iterator[GPU]:
    """A slice or a process, as a record of the card it belongs to."""
    found = _SLICE.match(line)
    if found:
        index, _, total, num_sm = found.groups()
        one = Slice(memory_mib=int(total), num_sm=int(num_sm) if num_sm else None)
        yield GPU(index=int(index), slices=(one,))
        return
    process = _PROCESS.match(line)
    if process:
        index, pid, kind, name, memory = process.groups()
        held = Process(int(pid), parse_text(name), parse_count(memory), kind)
        yield GPU(index=int(index), processes=(held,), reported=frozenset({"processes"}))


def _gathered(extras: Iterable[GPU]) -> Iterator[GPU]:
    """One record a card: two equal slices are two, which joining would take for one."""
    by_card: dict[int | None, list[GPU]] = {}
    for extra in extras:
        by_card.setdefault(extra.index, []).append(extra)
    for index, records in by_card.items():
        yield GPU(
            index=index,
            slices=tuple(one for record in records for one in record.slices),
            processes=tuple(one for record in records for one in record.processes),
            reported=frozenset().union(*(record.reported for record in records)),
        )


def parse_list(text: str) -> tuple[GPU, ...]:
    """Cards and MIG slices from `nvidia-smi -L`, and cards from the headings of `nvlink -s`."""
    cards: list[GPU] = []
    for line in text.splitlines():
        found = _LISTED.match(line)
        if found:
            index, name, uuid = found.groups()
            known = frozenset({"name"})
            cards.append(GPU(index=int(index), name=name, uuid=uuid or "", reported=known))
            continue
        piece = _LISTED_SLICE.match(line)
        if piece and cards:
            last = cards[-1]
            slices = (*last.slices, Slice(name=piece[1], memory_mib=_slice_mib(piece[1])))
            known = last.reported | {"is_mig"}
            cards[-1] = replace(last, slices=slices, is_mig=True, reported=known)
    return tuple(cards)


def parse_instances(text: str) -> tuple[GPU, ...]:
    """Cards with the slices that `nvidia-smi mig -lgi` lists; `-lgip` lists only what could be."""
    slices: dict[int, list[Slice]] = {}
    for line in text.splitlines():
        instance, profile = _LISTED_INSTANCE.match(line), _SLICE_PROFILE.match(line)
        if instance:
            one = Slice(name=instance[2], memory_mib=_slice_mib(instance[2]))
            slices.setdefault(int(instance[1]), []).append(one)
        elif profile:
            slices.setdefault(int(profile[1]), [])
    known = frozenset({"is_mig"})
    return tuple(
        GPU(index=index, is_mig=True, slices=tuple(found), reported=known)
        for index, found in slices.items()
    )


def _slice_mib(name: str) -> int | None:
    size = _SLICE_GB.search(name)
    return int(size[1]) * 1024 if size else None


def parse_devices(text: str) -> tuple[GPU, ...]:
    """Cards in a text; empty if it holds none in these forms."""
    return tuple(_properties(text)) or tuple(_queried(text))


def _properties(text: str) -> Iterator[GPU]:
    for index, (name, major, minor, total) in enumerate(_PROPERTIES.findall(text)):
        capability = float(f"{major}.{minor}")
        yield GPU(
            index=index, name=name, compute_capability=capability, memory_mib=int(total),
            reported=_CUDA_KNOWN,
        )  # fmt: skip


def _queried(text: str) -> Iterator[GPU]:
    starts = list(_CUDA_DEVICE.finditer(text))
    ends = [match.start() for match in starts[1:]] + [len(text)]
    for start, end in zip(starts, ends, strict=False):
        piece = text[start.start() : end]
        capability, memory = _CUDA_CAPABILITY.search(piece), _CUDA_MEMORY.search(piece)
        yield GPU(
            index=int(start[1]),
            name=start[2],
            compute_capability=float(f"{capability[1]}.{capability[2]}") if capability else None,
            memory_mib=int(memory[1]) if memory else None,
            reported=_CUDA_KNOWN if memory else frozenset({"name"}),
        )
