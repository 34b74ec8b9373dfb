"""How the cards of a machine are joined: `nvidia-smi topo -m`, `nvlink -s` and peer access."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Topology:
    """How each pair of cards is joined.

    Attributes:
        cards: Their numbers.
        pairs: `NV12`, `PIX`, `PHB`, `SYS` and so on, by the two numbers, lower first.
    """

    cards: tuple[int, ...]
    pairs: Mapping[tuple[int, int], str]

    def by_kind(self) -> dict[str, list[tuple[int, int]]]:
        """Pairs by how they are joined, the most frequent first."""
        counts = Counter(self.pairs.values())
        return {
            kind: sorted(pair for pair, found in self.pairs.items() if found == kind)
            for kind, _ in counts.most_common()
        }


@dataclass(frozen=True)
class NVLinks:
    """NVLink of one card.

    Attributes:
        index: The card.
        name: Its product.
        active: Numbers of links that are up.
        inactive: Numbers of links that are not.
        num_errors: Replays, recoveries and checksum errors on them.
        is_off: The tool says that none is up, without a list.
    """

    index: int
    name: str
    active: tuple[int, ...] = ()
    inactive: tuple[int, ...] = ()
    num_errors: int = 0
    is_off: bool = False


def parse_topology(text: str) -> Topology | None:
    """The matrix of `nvidia-smi topo -m`; None if there is none. Other columns are passed over."""
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
        heading = _HEADING.match(line)
        if heading:
            index, name = int(heading[1]), heading[2]
        link, errors = _NVLINK.match(line), _NVLINK_ERRORS.match(line)
        card = found.get(index, NVLinks(index, name))
        if link:
            number = int(link[1])
            is_up = "inactive" not in link[2].lower()
            active = (*card.active, number) if is_up else card.active
            inactive = card.inactive if is_up else (*card.inactive, number)
            found[index] = NVLinks(index, name, active, inactive, card.num_errors)
        elif _ALL_OFF.search(line):
            found[index] = NVLinks(index, name, is_off=True)
        elif errors:
            total = card.num_errors + int(errors[3])
            found[index] = NVLinks(index, name, card.active, card.inactive, total)
    return tuple(found.values())
