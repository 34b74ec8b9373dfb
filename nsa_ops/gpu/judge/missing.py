"""Judge which cards of a machine are missing among those that answer."""

from collections.abc import Iterable, Iterator, Sequence

from nsa_core.rundir.report import CheckResult
from nsa_ops.gpu.card import GPU
from nsa_ops.gpu.judge.result import checked
from nsa_ops.gpu.read.evidence import Evidence
from nsa_ops.quantities import count_of

#: A larger number is that of no card: what a machine prints is not believed without a bound.
_MAX_CARDS = 256


def judge_missing(evidences: Sequence[Evidence], cards: Sequence[GPU]) -> list[CheckResult]:
    """A warning that names each card which some source knows and the driver does not show.

    One record of one card says nothing of the others: `nvidia-smi -i` was asked for it.

    Args:
        evidences: Everything that was read.
        cards: Cards that a source tells of, joined.
    """
    numbers, buses = set(_numbers(evidences, cards)), set(_buses(evidences, cards))
    attached = max((one.num_attached or 0 for one in evidences), default=0)
    num_untold = attached - len(cards) if len(cards) > 1 else 0
    if not numbers and not buses and num_untold > 0:
        numbers = set(_gaps(card.minor for card in cards))
    named = [f"GPU {number}" for number in sorted(numbers)]
    named += [f"the card at {bus}" for bus in sorted(buses)]
    if not named and num_untold <= 0:
        return []
    missing = ", ".join(named) or f"{num_untold} that no source names"
    return [
        checked(
            "gpu.missing", "warn",
            f"{count_of(len(cards), 'card')} shown; missing: {missing}",
            measured=str(len(cards)), limit=str(max(attached, len(cards) + len(named))),
            command="nvidia-smi -L; lspci -d 10de: -nn; dmesg | grep -iE 'nvrm|xid'",
            hint="The kernel log says why it does not answer; reboot, or take another pod",
        )
    ]  # fmt: skip


def _numbers(evidences: Sequence[Evidence], cards: Sequence[GPU]) -> Iterator[int]:
    """Numbers that are left out, or that only the drawing of the links knows."""
    shown = {card.index for card in cards if card.index is not None}
    if len(shown) < len(cards) or not shown:
        return
    if len(shown) > 1:
        yield from _gaps(shown)
    for evidence in evidences:
        if evidence.topology is not None:
            yield from set(evidence.topology.cards) - shown


def _gaps(numbers: Iterable[int | None]) -> list[int]:
    """Numbers below the largest that are not there; none where one is unknown, or no card's."""
    known = list(numbers)
    found = {number for number in known if number is not None and 0 <= number < _MAX_CARDS}
    return sorted(set(range(max(found, default=0))) - found) if len(found) == len(known) else []


def _buses(evidences: Sequence[Evidence], cards: Sequence[GPU]) -> Iterator[str]:
    shown = {card.bus for card in cards}
    if shown and "" not in shown:
        for evidence in evidences:
            yield from set(evidence.pci_cards) - shown
