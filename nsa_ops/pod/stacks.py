"""hang_report.json: what every rank does while nothing moves, and which of them differs."""

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from nsa_core.config.base import TolerantModel
from nsa_core.rundir.atomic import write_text
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.process import ProcessIdentity, is_alive, state_of
from nsa_ops.pod.rank_traces import last_beat
from nsa_ops.pod.trainer_group import TrainerGroup

_DUMP_WAIT_S = 2.0
_DUMP_POLL_S = 0.05
_MOST_CHARACTERS = 200_000
_SPY_S = 10.0
_MOST_RECORDS = 64
#: Addresses and thread numbers differ between ranks that are at the same place.
_NOISE = re.compile(r"0x[0-9a-f]+")
#: What the kernel's letter says of a process that writes no stacks.
_STATES = {
    "T": "is stopped (SIGSTOP); SIGCONT lets it continue",
    "t": "is stopped by a debugger",
    "D": "waits in the kernel for a disk or a card, and takes no signal",
}


class StackGroup(TolerantModel):
    """Ranks whose newest stacks read the same."""

    ranks: list[int]
    text: str


class SilentRank(TolerantModel):
    """A rank that gave no stacks, and why, as far as the kernel says."""

    rank: int
    why: str


class FlightRecord(TolerantModel):
    """A file in which torch left the last collectives of a rank that waited too long."""

    name: str
    size_bytes: int


class HangReport(TolerantModel):
    """Content of hang_report.json.

    Attributes:
        still: The second dump reads like the first: nothing moved in between.
        groups: Newest stacks of all ranks, the smallest group first: it names the odd rank.
        silent: Ranks without stacks: the first ones to look at.
        odd: Which rank differs from the others, in one sentence; empty where none does.
        places: By rank, phase and step of the newest heartbeat.
        flight_records: Dumps of NCCL's flight recorder beside this file.
        note: Why there are no stacks; empty if there are.
    """

    schema_version: int = 1
    at: float
    attempt: int
    rule: str
    sentence: str
    still: bool = False
    groups: list[StackGroup] = []
    silent: list[SilentRank] = []
    odd: str = ""
    places: dict[int, str] = {}
    flight_records: list[FlightRecord] = []
    note: str = ""


def group_stacks(stacks: dict[int, str]) -> list[StackGroup]:
    """Ranks with the same text together, the smallest group first."""
    groups: dict[str, list[int]] = {}
    for rank, text in sorted(stacks.items()):
        groups.setdefault(_NOISE.sub("0x…", text), []).append(rank)
    return [
        StackGroup(ranks=ranks, text=text)
        for text, ranks in sorted(groups.items(), key=lambda item: len(item[1]))
    ]


def find_odd(groups: list[StackGroup], silent: list[SilentRank]) -> str:
    """Which rank differs from the others: one without stacks, or one that is elsewhere; pure."""
    num_ranks = sum(len(group.ranks) for group in groups) + len(silent)
    if num_ranks == 1:
        return ""
    if silent:
        return "; ".join(f"rank {one.rank} {one.why}" for one in silent)
    smallest = groups[0].ranks if groups else []
    if len(groups) < 2 or len(smallest) == len(groups[1].ranks):
        return ""
    named = ", ".join(map(str, smallest))
    return f"rank {named} is at another place than the other {num_ranks - len(smallest)}"


def explain_silence(state: str, *, catches_it: bool) -> str:
    """Why a rank gives no stacks, by the kernel's letter for its state; pure."""
    if not state:
        return "is gone"
    if state in _STATES:
        return _STATES[state]
    if not catches_it:
        return "takes no SIGUSR1 yet: it is starting"
    return f"wrote no stacks within {_DUMP_WAIT_S:.0f} s of SIGUSR1 (state {state})"


def _sizes(run: RunDir) -> dict[Path, int]:
    return {path: path.stat().st_size for path in run.root.glob("stackdump_rank*.txt")}


def dump_stacks(group: TrainerGroup) -> tuple[dict[int, str], set[int]]:
    """By rank, the stacks that came within 2 s; and the ranks that were asked."""
    before = _sizes(group.run)
    asked = set(group.signal(signal.SIGUSR1))
    awaited = {group.run.stack_dump(rank): rank for rank in asked}
    end = time.monotonic() + _DUMP_WAIT_S
    while time.monotonic() < end and not _have_grown(awaited, before, _sizes(group.run)):
        time.sleep(_DUMP_POLL_S)
    time.sleep(_DUMP_POLL_S)  # let the writers finish their last lines
    stacks = {}
    for path in awaited.keys() & _sizes(group.run).keys():
        with path.open("rb") as file:
            file.seek(before.get(path, 0))
            text = file.read(_MOST_CHARACTERS).decode(errors="replace")
        if text:
            stacks[awaited[path]] = text
    return stacks, asked


def _have_grown(awaited: Iterable[Path], before: dict[Path, int], now: dict[Path, int]) -> bool:
    return all(now.get(path, 0) > before.get(path, 0) for path in awaited)


def read_by_debugger(identity: ProcessIdentity) -> str:
    """What py-spy shows of a process that writes no stacks; empty where it is absent or refused."""
    program = shutil.which("py-spy")
    if program is None or not is_alive(identity):
        return ""
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(identity.pid)],
            capture_output=True, timeout=_SPY_S, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout[:_MOST_CHARACTERS].decode(errors="replace") if done.returncode == 0 else ""


def list_flight_records(run: RunDir, since_unix_s: float) -> list[FlightRecord]:
    """Dumps that were written since then, by name; a bounded number."""
    found = []
    for path in sorted(run.root.glob(run.flight_record().name + "*"))[:_MOST_RECORDS]:
        facts = path.stat()
        if path.is_file() and facts.st_mtime >= since_unix_s:
            found.append(FlightRecord(name=path.name, size_bytes=facts.st_size))
    return found


def report_hang(group: TrainerGroup, *, rule: str, sentence: str) -> HangReport:
    """Dump the stacks of all ranks twice and write hang_report.json.

    A process that writes none is looked at from outside.
    """
    first, _ = dump_stacks(group)
    second, asked = dump_stacks(group)
    newest = first | second
    silent, seen = [], {}
    for rank, identity in group.members().items():
        if rank not in newest:
            why = explain_silence(state_of(identity), catches_it=rank in asked)
            silent.append(SilentRank(rank=rank, why=why))
            seen[rank] = read_by_debugger(identity)
    newest |= {rank: text for rank, text in seen.items() if text}
    groups = group_stacks(newest)
    report = HangReport(
        at=time.time(),
        attempt=group.attempt,
        rule=rule,
        sentence=sentence,
        still=bool(first) and group_stacks(first) == group_stacks(second),
        groups=groups,
        silent=silent,
        odd=find_odd([one for one in groups if not set(one.ranks) <= seen.keys()], silent),
        places=_places(group),
        flight_records=list_flight_records(group.run, group.run.manifest.stat().st_mtime),
        note="" if newest else "no stacks came within 2 s of SIGUSR1: the process may be stopped",
    )
    write_text(group.run.hang_report, report.model_dump_json(indent=2) + "\n")
    return report


def _places(group: TrainerGroup) -> dict[int, str]:
    beats = {rank: last_beat(group.run, rank, group.attempt) for rank in group.members()}
    return {rank: f"{one.phase}, step {one.step}" for rank, one in beats.items() if one}
