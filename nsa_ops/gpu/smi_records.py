"""Cards from nvidia-smi's records: `-q` as indented text and as XML, whole or cut off, and CSV."""

import csv
import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from nsa_ops.gpu.card import GPU
from nsa_ops.gpu.smi_fields import (
    FIELDS,
    PARTS,
    SECTIONS,
    Leaf,
    card_from,
    leaf_name,
    parse_bus,
    parse_count,
    parse_text,
    piece_from,
    process_from,
)

_CARD_LINE = re.compile(r"^GPU\s+([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])\s*$")
_PROMPT = re.compile(r"^\s*(?:\([\w-]+\)\s*)?(?:[\w.@~:/-]+\s*)?[$#]\s")
_TAG = re.compile(r"<(/?)([A-Za-z_][\w.-]*)([^<>]*?)(/?)>([^<]*)")
_ID = re.compile(r'\bid\s*=\s*"([^"]*)"')
_ROOT = "nvidia_smi_log"
_MIN_LINES = 3
_ATTACHED = re.compile(
    r"^[ \t]*Attached GPUs[ \t]* : *(\d{1,9})|<attached_gpus>\s*(\d{1,9})", re.MULTILINE
)
_QUERY = re.compile(r"--query-(gpu|compute-apps|remapped-rows|retired-pages)[= ]([\w.,]+)")
_KNOWN = {place for _, places in FIELDS.values() for place in places} | {"pid", "process_name"}
#: Groups of fields that are summed, whatever their ending.
_FAMILIES = ("ecc.errors.", "clocks_throttle_reasons.", "clocks_event_reasons.")
#: A header has two known columns at least, so that a line of prose is not taken for one.
_MIN_COLUMNS = 2


def parse_num_attached(text: str) -> int | None:
    """Cards of the machine by the head of a full record, which may be of some of them only."""
    found = _ATTACHED.search(text)
    return int(found[1] or found[2]) if found else None


def parse_query_text(text: str) -> tuple[GPU, ...]:
    """Cards from the text of `nvidia-smi -q`; whatever is around it is skipped."""
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
    return _finished(cards, [] if cards else list(_headless(text)), header)


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


def parse_xml(text: str) -> tuple[GPU, ...]:
    """Cards from the XML of `nvidia-smi -q -x`, by tags alone: XML that is cut off still counts."""
    if not any(f"<{tag}" in text for tag in (_ROOT, "gpu", *SECTIONS)):
        return ()
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
    return _finished(cards, loose, header)


def _keep(path: list[str], value: str, leaves: list[Leaf]) -> None:
    if path and value:
        leaves.append((tuple(path), value))


def _close(path: list[str], name: str) -> None:
    if name in path:
        while path.pop() != name:
            pass


def _finished(
    records: list[list[Leaf]], loose: list[Leaf], header: dict[str, str]
) -> tuple[GPU, ...]:
    """Cards of whole records, numbered where all are there; else that of a piece without head."""
    if records:
        num_attached = parse_count(header.get("attached_gpus", ""))
        whole = [leaves for leaves in records if len(leaves) >= _MIN_LINES]
        is_all = num_attached is None or num_attached == len(whole)
        cards = [
            replace(card_from(leaves), index=number if is_all else None)
            for number, leaves in enumerate(whole)
        ]
    else:
        piece = piece_from(loose)
        cards = [] if piece is None else [piece]
    driver, cuda = (parse_text(header.get(f"{name}_version", "")) for name in ("driver", "cuda"))
    return tuple(replace(card, driver_version=driver, cuda_version=cuda) for card in cards)


def parse_csv(text: str) -> tuple[GPU, ...]:
    """Cards and processes from CSV, by its header or the command above it; skips other lines."""
    names: list[str] = []
    cards = []
    for line in text.splitlines():
        asked = _QUERY.search(line)
        if asked:
            names = [leaf_name(column) for column in asked[2].split(",")]
            continue
        cells = _cells(line)
        if _is_header(cells):
            names = [leaf_name(cell) for cell in cells]
        elif names and len(cells) == len(names) and len(cells) > 1:
            cards.append(_card(names, cells))
    return tuple(_counted(cards))


def _cells(line: str) -> list[str]:
    if "," not in line:
        return []
    row = next(csv.reader([line.replace("\0", "")], skipinitialspace=True), [])
    return [cell.strip() for cell in row]


def _is_header(cells: Sequence[str]) -> bool:
    names = [leaf_name(cell) for cell in cells]
    return sum(name in _KNOWN or name.startswith(_FAMILIES) for name in names) >= _MIN_COLUMNS


def _card(names: Sequence[str], cells: Sequence[str]) -> GPU:
    if "pid" not in names:
        return card_from([((name,), cell) for name, cell in zip(names, cells, strict=True)])
    row = dict(zip(names, cells, strict=True))
    return GPU(
        bus=parse_bus(row.get("gpu_bus_id", "")),
        uuid=parse_text(row.get("gpu_uuid", "")),
        name=parse_text(row.get("gpu_name", "")),
        processes=(process_from(row, "C"),),
        reported=frozenset({"processes"}),
    )


def _counted(cards: Sequence[GPU]) -> Iterator[GPU]:
    """Cards without any identity, as a query of few fields gives them, counted in their order."""
    number = 0
    for card in cards:
        if card.index is None and not card.uuid and not card.bus:
            yield card.joined(GPU(index=number))
            number += 1
        else:
            yield card
