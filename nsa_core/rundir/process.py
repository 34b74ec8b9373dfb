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


def session_members(session: int) -> list[int]:
    """Pids of all processes in a session that are not zombies."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat_fields(int(entry.name))
            if fields and int(fields[3]) == session and fields[0] not in "ZX":
                members.append(int(entry.name))
    return members
