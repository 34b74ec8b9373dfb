"""Cards from the full records of nvidia-smi: `-q` as indented text and as XML, whole or cut off."""

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from nsa_ops.gpu.card import GPU
from nsa_ops.gpu.read.readings import parse_count, parse_text
from nsa_ops.gpu.read.smi_fields import PARTS, SECTIONS, Leaf, card_from, leaf_name, piece_from

_CARD_LINE = re.compile(r"^GPU\s+([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])\s*$")
_PROMPT = re.compile(r"^\s*(?:\([\w-]+\)\s*)?(?:[\w.@~:/-]+\s*)?[$#]\s")
_TAG = re.compile(r"<(/?)([A-Za-z_][\w.-]*)([^<>]*?)(/?)>([^<]*)")
_ID = re.compile(r'\bid\s*=\s*"([^"]*)"')
_ROOT = "nvidia_smi_log"
_MIN_LINES = 3


@dataclass(frozen=True)
class Records:
    """What full records say.

    Attributes:
        cards: A card each.
        num_attached: Cards of the machine; more than `cards` if only some were asked.
    """

    cards: tuple[GPU, ...] = ()
    num_attached: int | None = None


def parse_query_text(text: str) -> Records:
    """Cards from `nvidia-smi -q`; whatever else stands around it is passed over."""
    header: dict[str, str] = {}
    cards: list[list[Leaf]] = []
    path: list[tuple[int, str]] = []
    inside = False
    for line in text.expandtabs().splitlines():
        card = _CARD_LINE.match(line)
        if card:
            cards.append([(("bus_id",), card[1])])
            path, inside = [], True
        elif _PROMPT.match(line):
            inside = False
        elif inside and line[:1].isspace():
            cards[-1] += _leaf(line, path)
        else:
            name, found, value = line.partition(" : ")
            if found:
                header.setdefault(leaf_name(name), value.strip())
    if not cards:
        return _piece(list(_headless(text)), header)
    whole = [leaves for leaves in cards if len(leaves) >= _MIN_LINES]
    return _records(whole, header)


def _headless(text: str) -> Iterator[Leaf]:
    """Values of sections that were copied without the line that names their card."""
    lines = text.expandtabs().splitlines()
    if not any(line[:1].isspace() and " : " in line for line in lines):
        lines = [_indented(line) for line in lines]
    path: list[tuple[int, str]] = []
    for line in lines:
        if path or _heading(line) in SECTIONS:
            yield from _leaf(line, path)


def _indented(line: str) -> str:
    """A line of a record that has lost its blanks, as those who print it know their depth."""
    if " : " in line:
        return f"        {line}"
    return line if _heading(line) in SECTIONS - PARTS else f"    {line}"


def _heading(line: str) -> str:
    return leaf_name(line.strip().removesuffix(":"))


def _piece(leaves: list[Leaf], header: dict[str, str]) -> Records:
    card = piece_from(leaves)
    return Records() if card is None else Records((_versioned(card, header),))


def _leaf(line: str, path: list[tuple[int, str]]) -> Iterator[Leaf]:
    """The value on a line of a card's record; keeps the headings above it in `path`."""
    name, has_value, value = line.partition(" : ")
    name = name.rstrip().removesuffix(":").strip()
    if not name or name.startswith("["):
        return
    indent = len(line) - len(line.lstrip())
    while path and path[-1][0] >= indent:
        path.pop()
    above = tuple(heading for _, heading in path)
    if has_value:
        yield (*above, leaf_name(name)), value.strip()
    path.append((indent, leaf_name(name)))


def parse_xml(text: str) -> Records:
    """Cards from `nvidia-smi -q -x`, by tags alone: XML that is cut off gives what it has."""
    if not any(f"<{tag}" in text for tag in (_ROOT, "gpu", *SECTIONS)):
        return Records()
    cards: list[list[Leaf]] = []
    loose: list[Leaf] = []
    path: list[str] = []
    for closing, tag, attributes, empty, content in _TAG.findall(text):
        name = leaf_name(tag)
        if closing:
            _close(path, name)
            continue
        if name == "gpu":
            named = _ID.search(attributes)
            cards.append([(("bus_id",), named[1])] if named else [])
            path = []
        elif name != _ROOT and not empty:
            path.append(name)
        _keep(path, html.unescape(content).strip(), cards[-1] if cards else loose)
    header = {path[0]: value for path, value in reversed(loose) if len(path) == 1}
    if not cards:
        return _piece(loose, header)
    return _records([leaves for leaves in cards if len(leaves) >= _MIN_LINES], header)


def _keep(path: list[str], value: str, leaves: list[Leaf]) -> None:
    if path and value:
        leaves.append((tuple(path), value))


def _close(path: list[str], name: str) -> None:
    if name in path:
        while path.pop() != name:
            pass


def _records(cards: list[list[Leaf]], header: dict[str, str]) -> Records:
    num_attached = parse_count(header.get("attached_gpus", ""))
    is_all = num_attached is None or num_attached == len(cards)
    read = (
        replace(card_from(leaves), index=number if is_all else None)
        for number, leaves in enumerate(cards)
    )
    return Records(tuple(_versioned(card, header) for card in read), num_attached)


def _versioned(card: GPU, header: dict[str, str]) -> GPU:
    driver, cuda = (parse_text(header.get(f"{name}_version", "")) for name in ("driver", "cuda"))
    return replace(card, driver_version=driver, cuda_version=cuda)
