"""Cards and processes from nvidia-smi's CSV answers, by their header or the command above."""

import csv
import re
from collections.abc import Iterator, Sequence

from nsa_ops.gpu.card import GPU, Process
from nsa_ops.gpu.read.readings import parse_bus, parse_count, parse_mib, parse_text
from nsa_ops.gpu.read.smi_fields import FIELDS, card_from, leaf_name

_QUERY = re.compile(r"--query-(gpu|compute-apps|remapped-rows|retired-pages)[= ]([\w.,]+)")
_KNOWN = {place for _, places in FIELDS.values() for place in places} | {"pid", "process_name"}
#: Fields that are summed over, whatever stands behind.
_FAMILIES = ("ecc.errors.", "clocks_throttle_reasons.", "clocks_event_reasons.")
#: Each answers for two columns at least, so that a line of prose is not taken for a header.
_MIN_COLUMNS = 2


def parse_csv(text: str, columns: Sequence[str] = ()) -> tuple[GPU, ...]:
    """Cards from CSV answers in a text; lines of another form are passed over.

    Args:
        text: What was printed, with or without the command.
        columns: Names of the columns, if the text shows neither header nor command.
    """
    names = [leaf_name(column) for column in columns]
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
    return tuple(_numbered(cards))


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
    process = Process(
        pid=parse_count(row["pid"]) or 0,
        name=parse_text(row.get("process_name", row.get("name", ""))),
        memory_mib=parse_mib(row.get("used_gpu_memory", row.get("used_memory", ""))),
        kind="C",
    )
    return GPU(
        bus=parse_bus(row.get("gpu_bus_id", "")),
        uuid=parse_text(row.get("gpu_uuid", "")),
        name=parse_text(row.get("gpu_name", "")),
        processes=(process,),
        reported=frozenset({"processes"}),
    )


def _numbered(cards: Sequence[GPU]) -> Iterator[GPU]:
    """Cards without any identity, as a query of few fields gives them, counted in their order."""
    number = 0
    for card in cards:
        if card.index is None and not card.uuid and not card.bus:
            yield card.joined(GPU(index=number))
            number += 1
        else:
            yield card
