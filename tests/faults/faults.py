"""The list of faults: each is one exact edit of the product, and the tests of which one must fail.

`lists/KIND.jsonl` holds one fault a line. Nothing here runs a test; `harness.py` does.
"""

import json
from dataclasses import dataclass
from pathlib import Path

LISTS = Path(__file__).parent / "lists"


class FaultListError(ValueError):
    """A line of the list is not a fault; the message names the file, the line and what is wrong."""


@dataclass(frozen=True)
class Fault:
    """One edit and who has to notice it.

    Attributes:
        id: Unique name; says what is wrong with the product, not where.
        kind: Part of the product: the name of the list.
        file: Edited file, from the root of the repository.
        old: Text that stands exactly once in the file.
        new: What takes its place.
        tests: Test ids as pytest takes them; at least one of their tests has to fail.
        equivalent: Why no test can notice the edit; empty for a real fault.
        gpu: The tests need a card.
        ci: Planted in every run of continuous integration; the others by `python -m tests.faults`.
    """

    id: str
    kind: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()
    equivalent: str = ""
    gpu: bool = False
    ci: bool = False

    def apply(self, text: str) -> str:
        """The text of the file with the fault in it.

        Raises:
            FaultListError: If `old` does not stand in it exactly once, or the edit changes nothing.
        """
        count = text.count(self.old)
        if count != 1:
            message = f"{self.id}: `old` stands {count} times in {self.file}, and has to stand once"
            raise FaultListError(message)
        if self.old == self.new:
            message = f"{self.id}: the edit changes nothing"
            raise FaultListError(message)
        return text.replace(self.old, self.new)


def read_faults(folder: Path = LISTS) -> list[Fault]:
    """Every fault of every list, in the order of the files.

    Raises:
        FaultListError: If a line is not a fault, has no test and no reason, or repeats an id.
    """
    faults: list[Fault] = []
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            faults.append(_parse(line, path.stem, f"{path.name}:{number}"))
    ids = [fault.id for fault in faults]
    repeated = sorted({name for name in ids if ids.count(name) > 1})
    if repeated:
        message = f"ids that occur twice: {', '.join(repeated)}"
        raise FaultListError(message)
    return faults


def _parse(line: str, kind: str, place: str) -> Fault:
    try:
        values = json.loads(line)
        fault = Fault(**values | {"kind": kind, "tests": tuple(values.get("tests", ()))})
    except (TypeError, ValueError) as error:
        message = f"{place}: not a fault: {error}"
        raise FaultListError(message) from error
    if bool(fault.tests) == bool(fault.equivalent):
        message = f"{place}: {fault.id} needs either tests or the reason why it is equivalent"
        raise FaultListError(message)
    return fault
