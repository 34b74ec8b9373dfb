"""How the cards of a machine are connected (`topo`, `nvlink`, peer access), and if that is good."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nsa_core.rundir.report import CheckResult, Status, checked
from nsa_ops.quantities import count_of

_CARD = re.compile(r"GPU(\d+)$")
_LINK = re.compile(r"(X|SYS|NODE|PHB|PXB|PIX|NV\d+|C2C)$")
_PEER = re.compile(r"(X|OK|CNS|GNS|TNS|NS|DR|U)$")
_HEADER_WORD = re.compile(r"(GPU\d|NIC\d|mlx|CPU|NUMA)")
_HEADING = re.compile(r"^\s*GPU (\d+): (.+?)(?: \(UUID:.*)?$")
_NVLINK = re.compile(r"^\s*Link (\d+):\s*(<?inactive>?|[\d.]+ GB/s)", re.IGNORECASE)
_NVLINK_ERRORS = re.compile(
    r"^\s*Link (\d+):\s*(.*?(?:Error|Errors|Recovery).*?):\s*(\d+)", re.IGNORECASE
)
_ALL_OFF = re.compile(r"all links are inactive", re.IGNORECASE)
_NO_PEER = re.compile(r"Device=(\d+) CANNOT Access Peer Device=(\d+)")
#: Links of boards on which every one should be up; a bridged card has some idle by design.
_EXPECTED_LINKS: Sequence[tuple[str, int]] = (
    (r"H100 80GB HBM3|\bH200(?! NVL)|\bH800(?!.*PCIe)|\bH20\b", 18),
    (r"A(100|800)-SXM", 12),
    (r"V100-SXM", 6),
    (r"P100-SXM", 4),
)
_FAR = frozenset({"SYS", "NODE"})
_UNEVEN = (
    "Train on cards that are connected alike (CUDA_VISIBLE_DEVICES), or expect the all-reduce to be"
    " as slow as the slowest pair; set NCCL_P2P_DISABLE=1 if the first collective hangs"
)


@dataclass(frozen=True)
class Topology:
    """How each pair of cards is connected."""

    cards: tuple[int, ...]  # their numbers
    #: `NV12`, `PIX`, `PHB`, `SYS` and so on, by the two numbers, lower first.
    pairs: Mapping[tuple[int, int], str]


@dataclass(frozen=True)
class NVLinks:
    """NVLink of one card."""

    index: int  # the card
    name: str  # its product
    active: tuple[int, ...] = ()  # numbers of links that are up
    inactive: tuple[int, ...] = ()  # numbers of links that are not
    num_errors: int = 0  # replays, recoveries and checksum errors on them
    is_off: bool = False  # the tool says that none is up, without a list


def parse_topology(text: str) -> Topology | None:
    """The matrix of `nvidia-smi topo -m`; None if there is none. Other columns are skipped."""
    return _matrix(text, _LINK)


def parse_peers(text: str) -> tuple[tuple[int, int], ...]:
    """Pairs without access to each other's memory: `topo -p2p`, `p2pBandwidthLatencyTest`."""
    pairs = {_ordered(int(a), int(b)) for a, b in _NO_PEER.findall(text)}
    matrix = _matrix(text, _PEER)
    if matrix is not None:
        pairs |= {pair for pair, word in matrix.pairs.items() if word not in {"OK", "X"}}
    return tuple(sorted(pairs))


def _matrix(text: str, cell: re.Pattern[str]) -> Topology | None:
    columns: list[int] = []
    cards: list[int] = []
    pairs: dict[tuple[int, int], str] = {}
    for line in text.splitlines():
        words = line.split()
        found = _CARD.match(words[0]) if words else None
        if found is None:
            continue
        if len(words) == 1 or _HEADER_WORD.match(words[1]):
            columns = [int(one[1]) for one in map(_CARD.match, words) if one]
            continue
        row, cells = int(found[1]), words[1 : len(columns) + 1]
        if not cells or not all(cell.match(word) for word in cells):
            continue  # a row of another matrix
        if row not in cards:
            cards.append(row)
        for column, word in zip(columns, cells, strict=False):
            if column != row:
                pairs.setdefault(_ordered(row, column), word)
    return Topology(tuple(cards), pairs) if cards else None


def _ordered(first: int, second: int) -> tuple[int, int]:
    return min(first, second), max(first, second)


def parse_nvlinks(text: str) -> tuple[NVLinks, ...]:
    """Links of each card from `nvidia-smi nvlink -s` and `-e`; cards without any are left out."""
    found: dict[int, NVLinks] = {}
    index, name = 0, ""
    for line in text.splitlines():
        if heading := _HEADING.match(line):
            index, name = int(heading[1]), heading[2]
        card = found.get(index, NVLinks(index, name))
        if link := _NVLINK.match(line):
            side = "inactive" if "inactive" in link[2].lower() else "active"
            numbers = (*getattr(card, side), int(link[1]))
            found[index] = replace(card, **{side: numbers}, is_off=False)  # type: ignore[arg-type]
        elif _ALL_OFF.search(line):
            found[index] = NVLinks(index, name, is_off=True)
        elif errors := _NVLINK_ERRORS.match(line):
            total = card.num_errors + int(errors[3])
            found[index] = replace(card, num_errors=total, is_off=False)
    return tuple(found.values())


def judge_topology(topology: Topology) -> CheckResult:
    """Whether every pair of cards is connected alike."""
    name, command, count = "gpu.topology", "nvidia-smi topo -m", len(topology.cards)
    if count == 1:
        return checked(name, "pass", "one card: nothing to connect", command=command)
    if not topology.pairs:
        message = f"{count_of(count, 'card')}, but the table of their connections is cut off"
        return checked(name, "unknown", message, command=command, hint=f"Run `{command}` again")
    kinds = {
        kind: sorted(pair for pair, found in topology.pairs.items() if found == kind)
        for kind, _ in Counter(topology.pairs.values()).most_common()
    }
    words = "; ".join(f"{kind}: {_name_pairs(pairs)}" for kind, pairs in kinds.items())
    status: Status = "warn"
    if len(kinds) == 1 and not _FAR & set(kinds):
        status = "pass"
        message = f"{count_of(count, 'card')}, every pair connected by {next(iter(kinds))}"
    elif any(kind.startswith("NV") for kind in kinds):
        message = f"uneven topology for {count}-GPU training: {words}"
    else:
        message = f"no NVLink between {count_of(count, 'card')}, PCIe only: {words}"
    return checked(
        name, status, message, measured=", ".join(kinds), limit="every pair alike",
        command=command, hint=_UNEVEN,
    )  # fmt: skip


def _name_pairs(pairs: Sequence[tuple[int, int]]) -> str:
    some = ", ".join(f"GPU{one}-{two}" for one, two in pairs[:3])
    return some if len(pairs) <= 3 else f"{some} and {len(pairs) - 3} more"


def judge_peers(pairs: Sequence[tuple[int, int]]) -> list[CheckResult]:
    """Pairs that cannot reach each other's memory."""
    if not pairs:
        return []
    message = f"cards that cannot reach each other's memory: {_name_pairs(pairs)}"
    hint = "Set NCCL_P2P_DISABLE=1 for training on several cards; check ACS and the IOMMU"
    return [checked("gpu.peers", "warn", message, command="nvidia-smi topo -p2p r", hint=hint)]


def judge_nvlinks(cards: Sequence[NVLinks]) -> list[CheckResult]:
    """Whether the links that should be up are, and all cards have alike many."""
    most = max((len(card.active) for card in cards), default=0)
    return [_judge_nvlink(card, most if len(cards) > 1 else None) for card in cards]


def _judge_nvlink(card: NVLinks, most: int | None) -> CheckResult:
    up, down = len(card.active), len(card.inactive)
    by_board = (count for board, count in _EXPECTED_LINKS if re.search(board, card.name))
    expected = next(by_board, None) or most
    message = f"{up} of {count_of(up + down, 'link')} up"
    status: Status = "pass"
    if expected is not None and up < expected and (up or down):
        status, message = "warn", f"{message}, and {expected} should be"
    elif not up and down:
        status, message = "warn", f"{message}: NVLink is off"
    elif card.is_off:
        message = "no link is up: NVLink is off, or the card has no bridge"
        status = "warn" if expected else "pass"
    elif down:
        message = f"{message}; the others have no bridge"
    if card.num_errors:
        status, message = "warn", f"{message}; {count_of(card.num_errors, 'link error')}"
    return checked(
        f"gpu{card.index}.nvlink", status, message, measured=str(up),
        limit="" if expected is None else str(expected), command="nvidia-smi nvlink -s",
        hint="Look for Xid 74 in the kernel log; reset the cards, or take another pod",
    )  # fmt: skip
