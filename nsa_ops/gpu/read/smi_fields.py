"""One table of where nvidia-smi keeps each fact of a card, for its text, XML and CSV alike."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nsa_ops.gpu.card import GPU, Process, Slice
from nsa_ops.gpu.read.readings import (
    is_unknown,
    parse_bus,
    parse_count,
    parse_flag,
    parse_mib,
    parse_number,
    parse_text,
)

#: A value and where it stood: names in lower case with underscores, outermost first.
Leaf = tuple[tuple[str, ...], str]
_NOT_WORD = re.compile(r"[^a-z0-9.]+")
_Reader = Callable[[str], Any]
#: Attribute of `GPU`: how its value is read, and its places in text, XML and CSV, best first.
FIELDS: Mapping[str, tuple[_Reader, tuple[str, ...]]] = {
    "index": (parse_count, ("index",)),
    "bus": (parse_bus, ("bus_id", "pci/bus_id", "pci/pci_bus_id", "pci.bus_id", "gpu_bus_id")),
    "name": (parse_text, ("product_name", "name", "gpu_name")),
    "uuid": (parse_text, ("gpu_uuid", "uuid")),
    "architecture": (parse_text, ("product_architecture",)),
    "compute_capability": (parse_number, ("compute_cap",)),
    "driver_version": (parse_text, ("driver_version",)),
    "cuda_version": (parse_text, ("cuda_version",)),
    "driver_model": (
        parse_text, ("driver_model/current", "driver_model/current_dm", "driver_model.current"),
    ),
    "is_persistent": (parse_flag, ("persistence_mode",)),
    "has_display": (parse_flag, ("display_active",)),
    "minor": (parse_count, ("minor_number",)),
    "memory_mib": (parse_mib, ("fb_memory_usage/total", "memory_usage/total", "memory.total")),
    "memory_used_mib": (parse_mib, ("fb_memory_usage/used", "memory_usage/used", "memory.used")),
    "utilization_percent": (
        parse_count, ("utilization/gpu", "utilization/gpu_util", "utilization.gpu"),
    ),
    "memory_load_percent": (
        parse_count, ("utilization/memory", "utilization/memory_util", "utilization.memory"),
    ),
    "temperature_c": (
        parse_count,
        (
            "temperature/gpu_current_temp", "temperature/gpu_temp", "temperature/gpu",
            "temperature.gpu",
        ),
    ),
    "slowdown_c": (
        parse_count, ("temperature/gpu_slowdown_temp", "temperature/gpu_temp_slow_threshold"),
    ),
    "power_w": (
        parse_number,
        (
            "gpu_power_readings/power_draw", "gpu_power_readings/average_power_draw",
            "gpu_power_readings/instantaneous_power_draw", "gpu_power_readings/instant_power_draw",
            "power_readings/power_draw", "power.draw", "power.draw.instant",
        ),
    ),
    "power_limit_w": (
        parse_number,
        (
            "gpu_power_readings/current_power_limit", "power_readings/power_limit",
            "power_readings/enforced_power_limit", "enforced.power.limit", "power.limit",
        ),
    ),
    "fan_percent": (parse_count, ("fan_speed", "fan.speed")),
    "clock_mhz": (
        parse_count, ("clocks/sm", "clocks/sm_clock", "clocks.sm", "clocks.current.sm"),
    ),
    "clock_max_mhz": (parse_count, ("max_clocks/sm", "max_clocks/sm_clock", "clocks.max.sm")),
    "is_mig": (parse_flag, ("mig_mode/current", "mig_mode/current_mig", "mig.mode.current")),
    "is_mig_pending": (
        parse_flag, ("mig_mode/pending", "mig_mode/pending_mig", "mig.mode.pending"),
    ),
    "has_ecc": (
        parse_flag, ("ecc_mode/current", "ecc_mode/current_ecc", "ecc.mode.current"),
    ),
    "ecc_threshold_exceeded": (
        parse_flag,
        (
            "ecc_errors/aggregate/sram_threshold_exceeded",
            "ecc.errors.uncorrected.aggregate.sram.thresholdexceeded",
        ),
    ),
    "remapped_correctable": (
        parse_count,
        (
            "remapped_rows/correctable_error", "remapped_rows/remapped_row_corr",
            "remapped_rows.correctable",
        ),
    ),
    "remapped_uncorrectable": (
        parse_count,
        (
            "remapped_rows/uncorrectable_error", "remapped_rows/remapped_row_unc",
            "remapped_rows.uncorrectable",
        ),
    ),
    "remap_pending": (
        parse_flag,
        ("remapped_rows/pending", "remapped_rows/remapped_row_pending", "remapped_rows.pending"),
    ),
    "remap_failed": (
        parse_flag,
        (
            "remapped_rows/remapping_failure_occurred", "remapped_rows/remapped_row_failure",
            "remapped_rows.failure",
        ),
    ),
    "retired_pages": (
        parse_count,
        (
            "retired_pages/double_bit_ecc", "retired_pages/double_bit_retirement/retired_count",
            "retired_pages.double_bit.count", "retired_pages.dbe.count",
        ),
    ),
    "retire_pending": (
        parse_flag,
        (
            "retired_pages/pending_page_blacklist", "retired_pages/pending_retirement",
            "retired_pages/pending_blacklist", "retired_pages/pending", "retired_pages.pending",
        ),
    ),
    "pcie_generation": (
        parse_count,
        (
            "pci/gpu_link_info/pcie_generation/current",
            "pci/pci_gpu_link_info/pcie_gen/current_link_gen", "pcie.link.gen.current",
            "pcie.link.gen.gpucurrent",
        ),
    ),
    "pcie_generation_max": (
        parse_count,
        (
            "pci/gpu_link_info/pcie_generation/max", "pci/pci_gpu_link_info/pcie_gen/max_link_gen",
            "pcie.link.gen.max",
        ),
    ),
    "pcie_width": (
        parse_count,
        (
            "pci/gpu_link_info/link_width/current",
            "pci/pci_gpu_link_info/link_widths/current_link_width", "pcie.link.width.current",
        ),
    ),
    "pcie_width_max": (
        parse_count,
        (
            "pci/gpu_link_info/link_width/max",
            "pci/pci_gpu_link_info/link_widths/max_link_width", "pcie.link.width.max",
        ),
    ),
    "compute_mode": (parse_text, ("compute_mode",)),
    "recovery_action": (parse_text, ("gpu_recovery_action",)),
    "reset_required": (
        parse_flag,
        ("gpu_reset_status/reset_required", "reset_status/reset_required"),
    ),
    "fabric_state": (parse_text, ("fabric/state", "fabric.state")),
}  # fmt: skip
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
    """The card that a piece of a record without its head is about; None if it tells nothing."""
    known = [
        (("ecc_errors", *path) if path[0] in PARTS else path, value)
        for path, value in leaves
        if path[0] in SECTIONS
    ]
    card = card_from(known)
    return card if card.reported else None


def card_from(leaves: Sequence[Leaf]) -> GPU:
    """A card from everything a source says of it; pure, and never an error.

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
    """Sums of memory errors; a total stands for its parts, and if it is unknown so are they."""
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
    return tuple(
        Process(
            pid=parse_count(one["pid"]) or 0,
            name=parse_text(one.get("name", one.get("process_name", ""))),
            memory_mib=parse_mib(one.get("used_gpu_memory", one.get("used_memory", ""))),
            kind=one.get("type", ""),
        )
        for one in found
    )
