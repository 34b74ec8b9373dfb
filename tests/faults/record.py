"""The record of faults that the tests have noticed, beside the list; docs/proof.md counts by it.

`python -m tests.faults --record` writes it. An entry is valid for one edit and one list of tests:
when either changes, the fault has to be planted again.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.faults.faults import Fault
from tests.faults.judge import Verdict

RECORD = Path(__file__).parent / "noticed.jsonl"


@dataclass(frozen=True)
class Seen:
    """One fault that was noticed.

    Attributes:
        id: Of the fault.
        edit: Hash of its edit.
        by: The test that failed.
        seconds: Wall time of its tests.
    """

    id: str
    edit: str
    by: str
    seconds: float

    def holds(self, fault: Fault) -> bool:
        """Whether it is about the edit and the tests that the list has now."""
        is_named = any(
            self.by == test or self.by.startswith((f"{test}[", f"{test}::")) for test in fault.tests
        )
        return self.edit == _hash(fault) and is_named


def _hash(fault: Fault) -> str:
    return hashlib.sha256(json.dumps([fault.old, fault.new]).encode()).hexdigest()[:12]


def read_record(path: Path = RECORD) -> dict[str, Seen]:
    """The entries by id; none without a file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {seen.id: seen for seen in (Seen(**json.loads(line)) for line in lines)}


def is_noticed(fault: Fault, record: Mapping[str, Seen]) -> bool:
    """Whether the record shows that the tests notice this very fault."""
    return fault.id in record and record[fault.id].holds(fault)


def write_record(faults: Sequence[Fault], verdicts: Sequence[Verdict], path: Path = RECORD) -> None:
    """Enter what was noticed, and strike out what was green or is no longer in the list."""
    record = read_record(path)
    for verdict in verdicts:
        name = verdict.fault.id
        if verdict.status == "green":
            record.pop(name, None)
        if verdict.status == "noticed":
            seconds = round(verdict.seconds, 1)
            record[name] = Seen(name, _hash(verdict.fault), verdict.reason, seconds)
    kept = [record[fault.id] for fault in faults if is_noticed(fault, record)]
    path.write_text("".join(json.dumps(asdict(seen)) + "\n" for seen in kept))


def page_rows(faults: Sequence[Fault], record: Mapping[str, Seen]) -> str:
    """The rows of docs/proof.md, kind by kind: faults, noticed, for a card, noticed, equivalent."""
    rows = []
    for kind in [*sorted({fault.kind for fault in faults}), "all"]:
        found = [fault for fault in faults if kind in (fault.kind, "all")]
        real = [fault for fault in found if not fault.equivalent]
        here = [fault for fault in real if not fault.gpu]
        card = [fault for fault in real if fault.gpu]
        noticed = [sum(is_noticed(fault, record) for fault in some) for some in (here, card)]
        counts = [len(here), noticed[0], len(card), noticed[1], len(found) - len(real)]
        rows.append(f"| {kind} | {' | '.join(map(str, counts))} |")
    return "\n".join(rows)
