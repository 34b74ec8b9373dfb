"""Where nvidia-smi keeps each value of a card, for its text, XML and CSV alike, and how to read it.

A value that a tool does not know is None, or an empty word, however the tool says so.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nsa_ops.gpu.card import GPU, Process, Slice

#: A value and where it stood: names in lower case with underscores, outermost first.
Leaf = tuple[tuple[str, ...], str]
_NUMBER = re.compile(r"(-?\d{1,18}(?:\.\d+)?)\s*(?:[x%]|[A-Za-z][A-Za-z/()]*)?")
_SIZE = re.compile(r"(\d{1,18}(?:\.\d+)?)\s*([KMGT])i?B", re.IGNORECASE)
_IN_MIB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}
_BUS = re.compile(r"\b([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})(?:\.[0-9a-f])?\b", re.IGNORECASE)
_UNKNOWN = frozenset({"", "n/a", "err!", "unknown", "not available", "not found", "gpu is lost"})
_UNKNOWN_STARTS = ("not supported", "unknown error", "requested functionality", "insufficient")
_FLAGS = {
    "yes": True, "enabled": True, "active": True, "on": True, "1": True,
    "no": False, "disabled": False, "not active": False, "off": False, "0": False,
}  # fmt: skip
_NOT_WORD = re.compile(r"[^a-z0-9.]+")


def parse_number(cell: str) -> float | None:
    """A number with or without a unit; None for every spelling of unknown, such as [N/A]."""
    found = _NUMBER.fullmatch(cell.strip())
    return float(found[1]) if found else None


def parse_count(cell: str) -> int | None:
    """A whole number, else None."""
    number = parse_number(cell)
    return None if number is None else int(number)


def parse_mib(cell: str) -> int | None:
    """A size in MiB; a bare number is one already."""
    found = _SIZE.fullmatch(cell.strip())
    if found:
        return int(float(found[1]) * _IN_MIB[found[2].upper()])
    return parse_count(cell)


def parse_flag(cell: str) -> bool | None:
    """Yes or no in NVIDIA's many words, else None."""
    return _FLAGS.get(cell.strip().lower())


def parse_text(cell: str) -> str:
    """A name or version; empty for every spelling of unknown."""
    bare = cell.strip()
    return "" if is_unknown(bare) else bare


def is_unknown(cell: str) -> bool:
    """Whether a cell says that the value is unknown: N/A, [Not Supported], ERR!, nothing at all."""
    bare = cell.strip().strip("[]").strip().lower()
    return bare in _UNKNOWN or bare.startswith(_UNKNOWN_STARTS)


def parse_bus(text: str) -> str:
    """The first PCI address in a text as `domain:bus:device`, as the kernel writes it, or empty."""
    found = _BUS.search(text)
    if found is None:
        return ""
    domain, bus, device = (int(part, 16) for part in found.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}"


_Reader = Callable[[str], Any]
#: By how a value is read: fields of `GPU` and their places in text, XML and CSV, best first. A
#: field with many places has several lines.
_PLACES: Mapping[_Reader, str] = {
    parse_text: """
        name: product_name name gpu_name
        uuid: gpu_uuid uuid
        architecture: product_architecture
        driver_version: driver_version
        cuda_version: cuda_version
        driver_model: driver_model/current driver_model/current_dm driver_model.current
        compute_mode: compute_mode
        recovery_action: gpu_recovery_action
        fabric_state: fabric/state fabric.state
    """,
    parse_bus: """
        bus: bus_id pci/bus_id pci/pci_bus_id pci.bus_id gpu_bus_id
    """,
    parse_number: """
        compute_capability: compute_cap
        power_w: gpu_power_readings/power_draw gpu_power_readings/average_power_draw
        power_w: gpu_power_readings/instantaneous_power_draw gpu_power_readings/instant_power_draw
        power_w: power_readings/power_draw power.draw power.draw.instant
        power_limit_w: gpu_power_readings/current_power_limit power_readings/power_limit
        power_limit_w: power_readings/enforced_power_limit enforced.power.limit power.limit
    """,
    parse_count: """
        index: index
        minor: minor_number
        utilization_percent: utilization/gpu utilization/gpu_util utilization.gpu
        memory_load_percent: utilization/memory utilization/memory_util utilization.memory
        temperature_c: temperature/gpu_current_temp temperature/gpu_temp temperature/gpu
        temperature_c: temperature.gpu
        slowdown_c: temperature/gpu_slowdown_temp temperature/gpu_temp_slow_threshold
        fan_percent: fan_speed fan.speed
        clock_mhz: clocks/sm clocks/sm_clock clocks.sm clocks.current.sm
        clock_max_mhz: max_clocks/sm max_clocks/sm_clock clocks.max.sm
        remapped_correctable: remapped_rows/correctable_error remapped_rows/remapped_row_corr
        remapped_correctable: remapped_rows.correctable
        remapped_uncorrectable: remapped_rows/uncorrectable_error remapped_rows/remapped_row_unc
        remapped_uncorrectable: remapped_rows.uncorrectable
        retired_pages: retired_pages/double_bit_ecc
        retired_pages: retired_pages/double_bit_retirement/retired_count
        retired_pages: retired_pages.double_bit.count retired_pages.dbe.count
        pcie_generation: pci/gpu_link_info/pcie_generation/current
        pcie_generation: pci/pci_gpu_link_info/pcie_gen/current_link_gen pcie.link.gen.current
        pcie_generation: pcie.link.gen.gpucurrent
        pcie_generation_max: pci/gpu_link_info/pcie_generation/max
        pcie_generation_max: pci/pci_gpu_link_info/pcie_gen/max_link_gen pcie.link.gen.max
        pcie_width: pci/gpu_link_info/link_width/current
        pcie_width: pci/pci_gpu_link_info/link_widths/current_link_width pcie.link.width.current
        pcie_width_max: pci/gpu_link_info/link_width/max
        pcie_width_max: pci/pci_gpu_link_info/link_widths/max_link_width pcie.link.width.max
    """,
    parse_mib: """
        memory_mib: fb_memory_usage/total memory_usage/total memory.total
        memory_used_mib: fb_memory_usage/used memory_usage/used memory.used
    """,
    parse_flag: """
        is_persistent: persistence_mode
        has_display: display_active
        is_mig: mig_mode/current mig_mode/current_mig mig.mode.current
        is_mig_pending: mig_mode/pending mig_mode/pending_mig mig.mode.pending
        has_ecc: ecc_mode/current ecc_mode/current_ecc ecc.mode.current
        ecc_threshold_exceeded: ecc_errors/aggregate/sram_threshold_exceeded
        ecc_threshold_exceeded: ecc.errors.uncorrected.aggregate.sram.thresholdexceeded
        remap_pending: remapped_rows/pending remapped_rows/remapped_row_pending
        remap_pending: remapped_rows.pending
        remap_failed: remapped_rows/remapping_failure_occurred remapped_rows/remapped_row_failure
        remap_failed: remapped_rows.failure
        retire_pending: retired_pages/pending_page_blacklist retired_pages/pending_retirement
        retire_pending: retired_pages/pending_blacklist retired_pages/pending retired_pages.pending
        reset_required: gpu_reset_status/reset_required reset_status/reset_required
    """,
}
#: Field of `GPU`: how its value is read, and its places, best first.
FIELDS: dict[str, tuple[_Reader, tuple[str, ...]]] = {}
for _read, _lines in _PLACES.items():
    for _line in _lines.strip().splitlines():
        _field, _, _places = _line.strip().partition(": ")
        _known = FIELDS.get(_field, (_read, ()))[1]
        FIELDS[_field] = _read, (*_known, *_places.split())
#: Parts of the section of memory errors, which may have been copied without its own heading.
PARTS = frozenset({"volatile", "aggregate"})
#: Sections of a card's record by which a piece of one is known, as when only errors are pasted.
SECTIONS = frozenset(
    {place.partition("/")[0] for _, places in FIELDS.values() for place in places if "/" in place}
    | PARTS
)
#: Reasons for being slowed: the last name in each dialect, older and newer.
_SLOWED = {
    "hw_slowdown": "hw_slowdown",
    "hw_thermal": "hw_thermal_slowdown",
    "hw_power_brake": "hw_power_brake_slowdown",
    "sw_thermal": "sw_thermal_slowdown",
}
_REASONS = ("clocks_throttle_reasons", "clocks_event_reasons")
_FEW_SPARES = ("low", "none")


def leaf_name(words: str) -> str:
    """A name as all dialects share it: `FB Memory Usage` and `fb_memory_usage` are one."""
    return _NOT_WORD.sub("_", words.lower().partition(" [")[0]).strip("_")


def piece_from(leaves: Sequence[Leaf]) -> GPU | None:
    """The card of a record that has lost its head; None if it holds no value of a card."""
    known = [
        (("ecc_errors", *path) if path[0] in PARTS else path, value)
        for path, value in leaves
        if path[0] in SECTIONS
    ]
    card = card_from(known)
    return card if card.reported else None


def card_from(leaves: Sequence[Leaf]) -> GPU:
    """A card from everything that a source says of it; never an error.

    Args:
        leaves: Values and where they stood; the first of two with one place counts.
    """
    places: dict[str, str] = {}
    for path, value in leaves:
        places.setdefault("/".join(path), value)
    values: dict[str, Any] = {}
    reported = set()
    for attribute, (read, candidates) in FIELDS.items():
        present = [place for place in candidates if place in places]
        known = [place for place in present if not is_unknown(places[place])]
        if present:
            reported.add(attribute)
            values[attribute] = read(places[(known or present)[0]])
    for group in (_slowed(places), _ecc(leaves), _spares(places)):
        values |= group
        reported |= set(group)
    return GPU(
        **{name: value for name, value in values.items() if value is not None},
        slices=_slices(leaves),
        processes=_processes(leaves),
        answers_badly=any("is lost" in value.lower() for _, value in leaves),
        reported=frozenset(reported),
        unknown=tuple(place for place, value in places.items() if is_unknown(value)),
    )


def _slowed(places: Mapping[str, str]) -> dict[str, bool | None]:
    found = {}
    for attribute, name in _SLOWED.items():
        for place, value in places.items():
            last = re.split(r"[/.]", place)[-1]
            plain = re.sub(r"^clocks_(throttle|event)_reason_", "", last)
            if place.startswith(_REASONS) and "counters" not in place and plain == name:
                found[attribute] = parse_flag(value)
    return found


def _ecc(leaves: Sequence[Leaf]) -> dict[str, int | None]:
    """Sums of memory errors; a total replaces its parts, and if it is unknown so is the sum."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for path, value in leaves:
        group = _ecc_group(path)
        if group:
            groups.setdefault(group, []).append((path[-1], value))
    return {name: _sum(cells) for name, cells in groups.items()}


def _ecc_group(path: tuple[str, ...]) -> str:
    words = "/".join(path)
    if not words.startswith(("ecc_errors/", "ecc.errors.")) or "threshold" in words:
        return ""
    if "aggregate" in words and re.search(r"sram\.|source", words):
        return ""  # parts of what sram_uncorrectable counts already
    is_bad = re.search(r"uncorrect|double_bit", words) is not None
    name = "ecc_uncorrected" if is_bad else "ecc_corrected"
    return f"{name}_life" if "aggregate" in words else name


def _sum(cells: list[tuple[str, str]]) -> int | None:
    totals = [value for name, value in cells if name.rpartition(".")[2] == "total"]
    numbers = [parse_count(value) for value in totals or [value for _, value in cells]]
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None


def _spares(places: Mapping[str, str]) -> dict[str, int | None]:
    found = {
        place: parse_count(value)
        for place, value in places.items()
        if place.startswith("remapped_rows")
        and "histogram" in place
        and re.split(r"[/._]", place)[-1] in _FEW_SPARES
    }
    known = [count for count in found.values() if count is not None]
    return {"banks_without_spares": sum(known) if known else None} if found else {}


def _slices(leaves: Sequence[Leaf]) -> tuple[Slice, ...]:
    """Slices listed in a card's record; each begins with its index."""
    found: list[dict[str, str]] = []
    for path, value in leaves:
        if path[0] not in {"mig_device", "mig_devices"}:
            continue
        if path[-1] == "index" or not found:
            found.append({})
        found[-1].setdefault("/".join(path[-2:]), value)
    sizes = [(one, parse_mib(one.get("fb_memory_usage/total", ""))) for one in found]
    return tuple(
        Slice(memory_mib=mib, num_sm=parse_count(one.get("shared/multiprocessor_count", "")))
        for one, mib in sizes
        if mib is not None
    )


def _processes(leaves: Sequence[Leaf]) -> tuple[Process, ...]:
    found: list[dict[str, str]] = []
    for path, value in leaves:
        if path[0] != "processes":
            continue
        if path[-1] in {"process_id", "pid"}:
            found.append({"pid": value})
        elif found:
            found[-1].setdefault(path[-1], value)
    return tuple(process_from(one, one.get("type", "")) for one in found)


def process_from(values: Mapping[str, str], kind: str) -> Process:
    """A process from its values by name, as records and CSV name them."""
    return Process(
        pid=parse_count(values["pid"]) or 0,
        name=parse_text(values.get("process_name", values.get("name", ""))),
        memory_mib=parse_mib(values.get("used_gpu_memory", values.get("used_memory", ""))),
        kind=kind,
    )
