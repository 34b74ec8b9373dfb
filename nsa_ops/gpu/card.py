"""GPU: what is known of one card, whatever tool reported it, and how several records become one."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace

#: First capability whose cards multiply bf16.
BF16_CAPABILITY = 8.0
#: NVIDIA's compute capability table; the first pattern that is found in the name counts.
_CAPABILITIES: Sequence[tuple[str, float]] = (
    (r"B300", 10.3),
    (r"\bG?B[12]00\b", 10.0),
    (r"RTX 50[5-9]0|Blackwell", 12.0),
    (r"\bG?H(100|200|800|20)\b", 9.0),
    (r"\bL(40S?|4|20|2)\b|RTX 40[5-9]0|Ada\b", 8.9),
    (r"\bA(100|800|30)X?\b|CMP 170HX", 8.0),
    (r"\bA(10G?|40|16|2)\b|RTX 30[5-9]0|RTX A\d{3,4}", 8.6),
    (r"\bT4G?\b|RTX 20[6-8]0|TITAN RTX|GTX 16\d0|Quadro RTX|\bT\d{3,4}\b", 7.5),
    (r"V100|TITAN V|GV100", 7.0),
    (r"P100|GP100", 6.0),
    (r"GTX 10[1-8]0|TITAN Xp?\b|\bP(4|40|[1-6]000)\b|GT 1030|\bMX\d{3}", 6.1),
    (r"GTX 9[5-8]0|\bM(4|6|10|40|60)\b", 5.2),
    (r"GTX 7[4-5]0", 5.0),
    (r"\bK(80)\b", 3.7),
    (r"\bK(20|40)\w?\b", 3.5),
)
_ARCHITECTURES = {
    "kepler": 3.5, "maxwell": 5.2, "pascal": 6.0, "volta": 7.0, "turing": 7.5, "ampere": 8.0,
    "ada lovelace": 8.9, "hopper": 9.0, "blackwell": 10.0,
}  # fmt: skip


@dataclass(frozen=True)
class Process:
    """A program that holds memory of a card."""

    pid: int  # on the host, if the tool was asked there
    name: str = ""
    memory_mib: int | None = None
    kind: str = ""  # `C` computes, `G` draws; empty if unknown


@dataclass(frozen=True)
class Slice:
    """One MIG slice of a card."""

    name: str = ""  # such as `3g.40gb`; empty if the source shows only its memory
    memory_mib: int | None = None
    num_sm: int | None = None


@dataclass(frozen=True)
class GPU:
    """One card; None, or an empty word, is a value that the source does not know, not zero."""

    index: int | None = None  # as nvidia-smi counts
    bus: str = ""  # PCI address, such as `0000:9b:00`
    name: str = ""  # as nvidia-smi prints it; its table cuts long names off with `...`
    uuid: str = ""
    architecture: str = ""  # such as Ampere
    compute_capability: float | None = None
    driver_version: str = ""
    tool_version: str = ""  # of nvidia-smi; inside WSL it differs from the driver's
    driver_model: str = ""  # WDDM, TCC or MCDM: Windows' driver; empty on plain Linux
    is_persistent: bool | None = None  # the driver stays loaded between programs
    has_display: bool | None = None  # it drives a screen
    minor: int | None = None  # number of its device node
    cuda_version: str = ""  # newest that the driver supports
    memory_mib: int | None = None
    memory_used_mib: int | None = None
    utilization_percent: int | None = None  # share of time with a kernel running
    memory_load_percent: int | None = None  # share of time in which its memory was accessed
    temperature_c: int | None = None
    slowdown_c: int | None = None  # at which the hardware slows itself down
    power_w: float | None = None
    power_limit_w: float | None = None
    fan_percent: int | None = None
    clock_mhz: int | None = None  # of its multiprocessors
    clock_max_mhz: int | None = None
    is_mig: bool | None = None  # divided into slices, or ready to be
    is_mig_pending: bool | None = None  # `is_mig` after the next reset
    has_ecc: bool | None = None
    ecc_corrected: int | None = None  # since the driver was loaded; `_life` is since it was made
    ecc_corrected_life: int | None = None
    ecc_uncorrected: int | None = None
    ecc_uncorrected_life: int | None = None
    ecc_threshold_exceeded: bool | None = None  # the card itself reports too many
    remapped_correctable: int | None = None  # memory rows replaced after many corrected errors
    remapped_uncorrectable: int | None = None  # memory rows replaced after an uncorrectable one
    remap_pending: bool | None = None  # a row will be replaced at the next reset
    remap_failed: bool | None = None
    banks_without_spares: int | None = None  # memory banks with few or no spare rows left
    retired_pages: int | None = None  # after double-bit errors (before Ampere)
    retire_pending: bool | None = None  # a page will be retired at the next reboot
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None  # lanes
    pcie_width_max: int | None = None
    hw_slowdown: bool | None = None  # this and the next three: why its clock is lowered now
    hw_thermal: bool | None = None
    hw_power_brake: bool | None = None
    sw_thermal: bool | None = None
    compute_mode: str = ""  # who may use it, such as Default
    recovery_action: str = ""  # what the driver asks for; `None` if nothing
    reset_required: bool | None = None
    fabric_state: str = ""  # of the NVSwitch fabric, such as Completed
    answers_badly: bool = False  # the tool printed ERR! or "GPU is lost" for it
    slices: tuple[Slice, ...] = ()
    processes: tuple[Process, ...] = ()
    #: Names of fields that the source has a place for, known or not.
    reported: frozenset[str] = field(default=frozenset(), compare=False)
    #: Names, in the source's words, of values that it does not know.
    unknown: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """`gpu0`, or `gpu@9b:00` where only the bus address is known."""
        if self.index is not None:
            return f"gpu{self.index}"
        return f"gpu@{self.bus.partition(':')[2]}" if self.bus else "gpu?"

    @property
    def capability(self) -> float | None:
        """Compute capability as the driver reports it, else as the card's name implies it."""
        if self.compute_capability is not None:
            return self.compute_capability
        for pattern, capability in _CAPABILITIES:
            if re.search(pattern, self.name):
                return capability
        return _ARCHITECTURES.get(self.architecture.strip().lower())

    def is_same(self, other: "GPU") -> bool:
        """Whether two records are of one card; the surest identity that both have decides."""
        for mine, theirs in ((self.uuid, other.uuid), (self.bus, other.bus)):
            if mine and theirs:
                return mine == theirs
        return self.index is not None and self.index == other.index

    def joined(self, other: "GPU") -> "GPU":
        """This record, with what only the other one knows."""
        changes: dict[str, object] = {
            one.name: getattr(other, one.name)
            for one in fields(self)
            if getattr(self, one.name) in (None, "", ()) and getattr(other, one.name) is not None
        }
        changes["answers_badly"] = self.answers_badly or other.answers_badly
        changes["reported"] = self.reported | other.reported
        changes["slices"] = _join_slices(self.slices, other.slices)
        known = {process.pid for process in self.processes}
        more = tuple(process for process in other.processes if process.pid not in known)
        changes["processes"] = self.processes + more
        return replace(self, **changes)  # type: ignore[arg-type]


def _join_slices(first: tuple[Slice, ...], second: tuple[Slice, ...]) -> tuple[Slice, ...]:
    """Slices of two sources; they list the same ones in the same order, or one lists none."""
    if not first or not second or len(first) != len(second):
        return max(first, second, key=len)
    return tuple(
        Slice(
            name=one.name or two.name,
            memory_mib=two.memory_mib if one.num_sm is None and two.num_sm else one.memory_mib,
            num_sm=one.num_sm if one.num_sm is not None else two.num_sm,
        )
        for one, two in zip(first, second, strict=True)
    )


def join_cards(records: Iterable[GPU]) -> tuple[GPU, ...]:
    """One record a card, from records of several sources, in the order they were first seen."""
    cards: list[GPU] = []
    for record in records:
        place = next((n for n, card in enumerate(cards) if card.is_same(record)), None)
        if place is None:
            cards.append(record)
        else:
            cards[place] = cards[place].joined(record)
    return tuple(cards)
