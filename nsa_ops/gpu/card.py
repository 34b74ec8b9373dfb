"""GPU: what is known of one card, from whatever source, and how two sources become one record."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace


@dataclass(frozen=True)
class Process:
    """A program that holds memory of a card.

    Attributes:
        pid: Its number; on the host, if the tool was asked there.
        name: As the driver knows it; empty where it may not say.
        memory_mib: What it holds; None if unknown.
        kind: `C` computes, `G` draws; empty if not told.
    """

    pid: int
    name: str = ""
    memory_mib: int | None = None
    kind: str = ""


@dataclass(frozen=True)
class Slice:
    """One MIG slice of a card.

    Attributes:
        name: Such as `3g.40gb`; empty if the source shows only its memory.
        memory_mib: What it has; from the name if only that is known.
        num_sm: Multiprocessors; None if unknown.
    """

    name: str = ""
    memory_mib: int | None = None
    num_sm: int | None = None


@dataclass(frozen=True)
class GPU:
    """One card; None, and empty for words, where the source cannot tell, which is not zero.

    Attributes:
        index: As nvidia-smi counts.
        bus: PCI address as `0000:9b:00`.
        name: As nvidia-smi prints it; may end in `...`, cut off by a table.
        uuid: Its identity.
        architecture: Such as Ampere.
        compute_capability: Such as 8.0.
        driver_version: Kernel driver.
        tool_version: nvidia-smi, which inside WSL has another version than Windows' driver.
        driver_model: How Windows' driver serves it (WDDM, TCC, MCDM); empty on plain Linux.
        is_persistent: The driver stays loaded between programs; Windows has no such mode.
        has_display: A screen is driven by it.
        minor: Number of its device node.
        cuda_version: Newest CUDA the driver knows.
        memory_mib: Total memory.
        memory_used_mib: In use by anybody.
        utilization_percent: Share of time with a kernel running.
        memory_load_percent: Share of time in which its memory was read or written.
        temperature_c: Degrees Celsius.
        slowdown_c: Temperature at which the hardware slows itself down.
        power_w: Draw.
        power_limit_w: Most it may draw.
        fan_percent: Fan speed.
        clock_mhz, clock_max_mhz: Clock of its multiprocessors now, and at best.
        is_mig: Cut into slices, or ready to be.
        is_mig_pending: What that becomes at the next reset.
        has_ecc: Error correction is on.
        ecc_corrected: Corrected memory errors since the driver was loaded.
        ecc_corrected_life: Corrected ones in the card's life.
        ecc_uncorrected: Uncorrected ones since the driver was loaded.
        ecc_uncorrected_life: Uncorrected ones in the card's life.
        ecc_threshold_exceeded: The card itself says that it has had too many.
        remapped_correctable: Rows replaced after many corrected errors.
        remapped_uncorrectable: Rows replaced after an uncorrectable error.
        remap_pending: A row waits for a reset to be replaced.
        remap_failed: A row could not be replaced.
        banks_without_spares: Memory banks with few or no spare rows left.
        retired_pages: Pages retired after double-bit errors (before Ampere).
        retire_pending: A page waits for a reboot to be retired.
        pcie_generation, pcie_generation_max: PCI Express generation now, and at best.
        pcie_width, pcie_width_max: Lanes now, and at best.
        hw_slowdown, hw_thermal, hw_power_brake, sw_thermal: Reasons for which it is slowed now.
        compute_mode: Who may use it, such as Default.
        recovery_action: What the driver wants done; `None` if nothing.
        reset_required: The driver wants a reset.
        fabric_state: Of the NVSwitch fabric, such as Completed.
        answers_badly: The tool printed ERR! or GPU is lost for it.
        slices: MIG slices.
        processes: Who holds memory.
        reported: Names of attributes that the source has a place for, known or not.
        unknown: Names, in the source's words, of values it could not tell.
    """

    index: int | None = None
    bus: str = ""
    name: str = ""
    uuid: str = ""
    architecture: str = ""
    compute_capability: float | None = None
    driver_version: str = ""
    tool_version: str = ""
    driver_model: str = ""
    is_persistent: bool | None = None
    has_display: bool | None = None
    minor: int | None = None
    cuda_version: str = ""
    memory_mib: int | None = None
    memory_used_mib: int | None = None
    utilization_percent: int | None = None
    memory_load_percent: int | None = None
    temperature_c: int | None = None
    slowdown_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    fan_percent: int | None = None
    clock_mhz: int | None = None
    clock_max_mhz: int | None = None
    is_mig: bool | None = None
    is_mig_pending: bool | None = None
    has_ecc: bool | None = None
    ecc_corrected: int | None = None
    ecc_corrected_life: int | None = None
    ecc_uncorrected: int | None = None
    ecc_uncorrected_life: int | None = None
    ecc_threshold_exceeded: bool | None = None
    remapped_correctable: int | None = None
    remapped_uncorrectable: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    banks_without_spares: int | None = None
    retired_pages: int | None = None
    retire_pending: bool | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    hw_slowdown: bool | None = None
    hw_thermal: bool | None = None
    hw_power_brake: bool | None = None
    sw_thermal: bool | None = None
    compute_mode: str = ""
    recovery_action: str = ""
    reset_required: bool | None = None
    fabric_state: str = ""
    answers_badly: bool = False
    slices: tuple[Slice, ...] = ()
    processes: tuple[Process, ...] = ()
    reported: frozenset[str] = field(default=frozenset(), compare=False)
    unknown: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """`gpu0`, or `gpu@9b:00` where only the bus address is known."""
        if self.index is not None:
            return f"gpu{self.index}"
        return f"gpu@{self.bus.partition(':')[2]}" if self.bus else "gpu?"

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
        changes["slices"] = join_slices(self.slices, other.slices)
        known = {process.pid for process in self.processes}
        more = tuple(process for process in other.processes if process.pid not in known)
        changes["processes"] = self.processes + more
        return replace(self, **changes)  # type: ignore[arg-type]


def join_slices(first: tuple[Slice, ...], second: tuple[Slice, ...]) -> tuple[Slice, ...]:
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
