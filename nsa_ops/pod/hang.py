"""What a process does while nothing moves: stacks twice, grouped by text, in hang_report.json."""

import re
import signal
import time
from pathlib import Path

from nsa_core.config.base import TolerantModel
from nsa_core.rundir.atomic import write_text
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.process import ProcessIdentity
from nsa_ops.pod.processes import send

_DUMP_WAIT_S = 2.0
_POLL_S = 0.05
_MOST_CHARACTERS = 200_000
#: Addresses and thread numbers differ between ranks that stand at the same place.
_NOISE = re.compile(r"0x[0-9a-f]+")


class StackGroup(TolerantModel):
    """Ranks whose newest stacks read the same."""

    ranks: list[int]
    text: str


class HangReport(TolerantModel):
    """Content of hang_report.json.

    Attributes:
        at: Unix seconds.
        attempt: Attempt.
        rule: Rule that found it.
        sentence: What it said.
        still: The second dump reads like the first: nothing moved in between.
        groups: Newest stacks of all ranks, the smallest group first: it names the odd rank.
        note: Why there are no stacks; empty if there are.
    """

    schema_version: int = 1
    at: float
    attempt: int
    rule: str
    sentence: str
    still: bool = False
    groups: list[StackGroup] = []
    note: str = ""


def parse_rank(path: Path) -> int:
    """The rank in `stackdump_rank3.txt`."""
    digits = re.search(r"(\d+)$", path.stem)
    return int(digits[1]) if digits else 0


def group_stacks(stacks: dict[int, str]) -> list[StackGroup]:
    """Ranks with the same text together, the smallest group first."""
    groups: dict[str, list[int]] = {}
    for rank, text in sorted(stacks.items()):
        groups.setdefault(_NOISE.sub("0x…", text), []).append(rank)
    return [
        StackGroup(ranks=ranks, text=text)
        for text, ranks in sorted(groups.items(), key=lambda item: len(item[1]))
    ]


def _sizes(run: RunDir) -> dict[Path, int]:
    return {path: path.stat().st_size for path in run.root.glob("stackdump_rank*.txt")}


def _dump(run: RunDir, trainer: ProcessIdentity) -> dict[int, str]:
    """Ask for stacks and read what was appended; empty if nothing came within 2 s."""
    before = _sizes(run)
    if not send(trainer, signal.SIGUSR1):
        return {}
    end = time.monotonic() + _DUMP_WAIT_S
    while time.monotonic() < end and _sizes(run) == before:
        time.sleep(_POLL_S)
    time.sleep(_POLL_S)  # let the writer finish its last lines
    stacks = {}
    for path in _sizes(run):
        with path.open("rb") as file:
            file.seek(before.get(path, 0))
            text = file.read(_MOST_CHARACTERS).decode(errors="replace")
        if text:
            stacks[parse_rank(path)] = text
    return stacks


def report_hang(
    run: RunDir, trainer: ProcessIdentity, *, attempt: int, rule: str, sentence: str
) -> HangReport:
    """Dump the stacks twice and write hang_report.json."""
    first = _dump(run, trainer)
    second = _dump(run, trainer)
    newest = second or first
    report = HangReport(
        at=time.time(),
        attempt=attempt,
        rule=rule,
        sentence=sentence,
        still=bool(first) and group_stacks(first) == group_stacks(second),
        groups=group_stacks(newest),
        note="" if newest else "no stacks came within 2 s of SIGUSR1: the process may be stopped",
    )
    write_text(run.hang_report, report.model_dump_json(indent=2) + "\n")
    return report
