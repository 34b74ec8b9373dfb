"""Who a process is: pid, start time and boot, so that a recycled pid is never taken for it."""

import os
from pathlib import Path

from nsa_core.config.base import TolerantModel

_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class ProcessIdentity(TolerantModel):
    """One process on one boot of one machine.

    Attributes:
        pid: Process id.
        start_ticks: Field 22 of /proc/PID/stat: clock ticks after boot at which it started.
        boot_id: The kernel's random id of this boot.
    """

    pid: int
    start_ticks: int
    boot_id: str


def boot_id() -> str:
    """The kernel's random id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


def _stat_fields(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on (field 3), or None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name may hold spaces and brackets; the fields begin after the last bracket.
    return text.rpartition(")")[2].split()


def identify(pid: int) -> ProcessIdentity | None:
    """Identity of a process that runs now; None if there is none, or if it is a zombie."""
    fields = _stat_fields(pid)
    if fields is None or fields[0] in "ZX":
        return None
    return ProcessIdentity(pid=pid, start_ticks=int(fields[19]), boot_id=boot_id())


def is_alive(identity: ProcessIdentity) -> bool:
    """Whether this very process still runs: same pid, same start, same boot."""
    return identify(identity.pid) == ProcessIdentity(
        pid=identity.pid, start_ticks=identity.start_ticks, boot_id=identity.boot_id
    )


def age_s(identity: ProcessIdentity) -> float:
    """Seconds since the process started."""
    uptime = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
    return uptime - identity.start_ticks / _CLOCK_TICKS


def state_of(identity: ProcessIdentity) -> str:
    """The kernel's letter for its state, such as T for stopped; empty if it does not run."""
    fields = _stat_fields(identity.pid) if is_alive(identity) else None
    return fields[0] if fields else ""


def parent_of(pid: int) -> int | None:
    """Pid of the process that started it, or adopted it; None if there is no such process."""
    fields = _stat_fields(pid)
    return int(fields[1]) if fields else None


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for this signal; without one USR1 would end it."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    lines = (line.split() for line in text.splitlines())
    masks = [int(words[1], 16) for words in lines if words[:1] == ["SigCgt:"]]
    return bool(masks and masks[0] >> (number - 1) & 1)


def children_of(parent: int) -> list[int]:
    """Pids of the processes that a process has started or adopted and that are not zombies."""
    return _processes_with(1, parent)


def session_members(session: int) -> list[int]:
    """Pids of all processes in a session that are not zombies."""
    return _processes_with(3, session)


def _processes_with(field: int, value: int) -> list[int]:
    """Pids of the living processes with this value in a field of `_stat_fields`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat_fields(int(entry.name))
            if fields and int(fields[field]) == value and fields[0] not in "ZX":
                found.append(int(entry.name))
    return found
