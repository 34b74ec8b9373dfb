"""Facts of this laptop: programs, state folder, registry, audit log, connections, keys, clock."""

import contextlib
import os
import re
import shutil
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

from nsa_ops.context import SSH, audit_log, ssh_settings, target_of
from nsa_ops.errors import OpsError
from nsa_ops.local_files import list_open
from nsa_ops.remote.audit import Chain, read_chain
from nsa_ops.remote.openssh import OpenSSHTransport, ask_master
from nsa_ops.remote.ssh.config import resolve
from nsa_ops.remote.ssh.host_keys import read_pin
from nsa_ops.settings import Settings
from nsa_ops.store import Intent, PodRecord
from nsa_ops.store.database import describe_newer, load_registry, read_version

TOOL_S = 10.0
_SOCKET_NAME = re.compile(r"[0-9a-f]{16}")
#: How each program is asked for its version.
VERSIONS = {
    "ssh": ("ssh", "-V"),
    "git": ("git", "--version"),
    "rsync": ("rsync", "--version"),
    "tmux": ("tmux", "-V"),
}


@dataclass(frozen=True)
class RegistryFacts:
    """The registry, read without changing it."""

    is_there: bool = False  # the first command that needs it creates it
    problem: str = ""  # what is wrong with it, in sqlite's words
    newer: str = ""  # why this version cannot use it, where a newer one wrote it
    pods: tuple[PodRecord, ...] = ()
    open_intents: tuple[Intent, ...] = ()  # begun and not finished
    newest_unix_s: float | None = None  # newest time that it holds


@dataclass(frozen=True)
class LinkFacts:
    """The sockets of shared connections."""

    problem: str = ""  # why no connection can be opened
    folders: tuple[Path, ...] = ()  # that others may enter, and take a socket over
    num_open: int = 0
    stale: tuple[Path, ...] = ()  # sockets that nobody listens on


@dataclass(frozen=True)
class LaptopFacts:
    """This machine as operator; a problem is empty where there is none."""

    python: tuple[int, int]
    settings_problem: str  # why the configuration cannot be used
    config_files: tuple[str, ...]
    versions: dict[str, str]  # of each program; empty if it is missing, fails or hangs
    state_dir: Path  # of the registry and the audit log
    state_problem: str  # why nothing can be written there
    state_free_bytes: int | None
    registry: RegistryFacts
    state_open: tuple[str, ...]  # what others may read, write or enter there
    audit: Chain | None  # None if there is no audit log, and none is known
    audit_problem: str  # why its state is unknown
    links: LinkFacts
    pin_problems: dict[str, str]  # why the host key or ssh configuration of a pod is unusable
    unknown_pins: tuple[Path, ...]  # keys of pods that the registry does not know
    unix_s: float
    is_synchronised: bool | None  # with a time server; None if unknown


def read_laptop(settings: Settings, settings_problem: str = "") -> LaptopFacts:
    """Look at this machine; changes nothing and asks no pod.

    Args:
        settings: Settings in force, or the built-in ones where the configured cannot be used.
        settings_problem: Why they cannot; empty if they can.
    """
    state = settings.state_dir
    registry = read_registry(state / "registry.sqlite", settings.scratch_dirs)
    audit, audit_problem = _read_audit(settings)
    return LaptopFacts(
        python=(sys.version_info.major, sys.version_info.minor),
        settings_problem=settings_problem,
        config_files=tuple(dict.fromkeys(one for one in settings.origins.values() if "/" in one)),
        versions={name: _version(words) for name, words in VERSIONS.items()},
        state_dir=state,
        state_problem=_write_problem(state),
        state_free_bytes=_free_bytes(state),
        registry=registry,
        state_open=tuple(list_open(state)),
        audit=audit,
        audit_problem=audit_problem,
        links=read_links(settings, registry.pods),
        pin_problems=dict(_pin_problems(settings, registry.pods)),
        unknown_pins=tuple(_unknown_pins(state, registry)),
        unix_s=time.time(),
        is_synchronised=_is_synchronised(),
    )


def read_registry(path: Path, scratch_dirs: Sequence[Path] = ()) -> RegistryFacts:
    """Look into the registry; a damaged or locked one is a fact, not an error."""
    if not path.is_file():
        return RegistryFacts()
    try:
        with contextlib.closing(load_registry(path, scratch_dirs)) as found:
            newer = describe_newer(read_version(found))
            if newer:
                return RegistryFacts(is_there=True, newer=newer)
            (verdict,) = found.execute("PRAGMA integrity_check(1)").fetchone()
            if verdict != "ok":
                return RegistryFacts(is_there=True, problem=str(verdict).splitlines()[0])
            intents = _select(found, Intent, "intents", "WHERE ended_unix_s IS NULL ORDER BY id")
            times = "SELECT max(t) FROM (SELECT max(at) t FROM intents UNION SELECT max(at) FROM "
            (newest,) = found.execute(f"{times}reports)").fetchone()
            pods = _select(found, PodRecord, "pods", "ORDER BY name")
    except (sqlite3.Error, TypeError) as error:
        return RegistryFacts(is_there=True, problem=str(error))
    return RegistryFacts(
        is_there=True, pods=tuple(pods), open_intents=tuple(intents), newest_unix_s=newest
    )


RecordT = TypeVar("RecordT", PodRecord, Intent)


def _select(
    registry: sqlite3.Connection, kind: type[RecordT], table: str, tail: str
) -> list[RecordT]:
    names = ", ".join(field.name for field in fields(kind))
    rows = registry.execute(f"SELECT {names} FROM {table} {tail}")  # noqa: S608 (names are ours)
    return [kind(*row) for row in rows]


def read_links(settings: Settings, pods: Sequence[PodRecord]) -> LinkFacts:
    """Look at the sockets of shared links, and whether one more could be opened."""
    problem = ""
    for pod in pods:
        if pod.kind == SSH:
            try:
                _ = OpenSSHTransport(target_of(pod, settings)).control_path
            except OpsError as error:
                problem = error.message
    sockets = [path for folder in settings.socket_dirs for path in _sockets(folder)]
    stale = tuple(path for path in sockets if ask_master(path) != "open")
    return LinkFacts(
        problem=problem,
        folders=tuple(one for one in settings.socket_dirs if _is_open_to_others(one)),
        num_open=len(sockets) - len(stale),
        stale=stale,
    )


def _sockets(folder: Path) -> Iterator[Path]:
    if folder.is_dir() and os.access(folder, os.R_OK | os.X_OK):
        for path in sorted(folder.iterdir()):
            if _SOCKET_NAME.fullmatch(path.name) and stat.S_ISSOCK(path.lstat().st_mode):
                yield path


def _is_open_to_others(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    found = folder.lstat()
    return bool(found.st_mode & 0o077) or found.st_uid != os.getuid()


def _pin_problems(settings: Settings, pods: Sequence[PodRecord]) -> Iterator[tuple[str, str]]:
    for pod in pods:
        if not pod.address:
            continue
        try:
            target = target_of(pod, settings)
            read_pin(target)
            if pod.kind == SSH:
                resolve(target.address, ssh_settings(settings))
        except OpsError as error:
            yield pod.name, error.message


def _unknown_pins(state: Path, registry: RegistryFacts) -> Iterator[Path]:
    known = {pod.pod_id for pod in registry.pods}
    folder = state / "known_hosts"
    if folder.is_dir() and not (registry.problem or registry.newer):
        yield from (path for path in sorted(folder.iterdir()) if path.name not in known)


def _version(words: Sequence[str]) -> str:
    """First line of a program's version; empty if it is not there, fails or hangs."""
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8",
            errors="replace", timeout=TOOL_S, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    lines = f"{done.stdout}\n{done.stderr}".strip().splitlines()
    return lines[0].strip() if lines else ""


def _write_problem(folder: Path) -> str:
    """Why nothing can be written in a folder, or in the nearest one that is there."""
    nearest = _nearest(folder)
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"`{nearest}` is not writable for this user"
    return "" if nearest.is_dir() else f"`{nearest}` is not a folder"


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(_nearest(folder)).free


def _nearest(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())


def _read_audit(settings: Settings) -> tuple[Chain | None, str]:
    """State of the audit log, or why it is unknown."""
    log = audit_log(settings)
    try:
        head = log.head.read() if log.head is not None else None
        is_known = log.path.is_file() or head is not None
        return (read_chain(log.path, head) if is_known else None), ""
    except (OpsError, OSError) as error:
        return None, str(error)


def _is_synchronised() -> bool | None:
    said = _version(("timedatectl", "show", "--property", "NTPSynchronized", "--value"))
    return {"yes": True, "no": False}.get(said)
