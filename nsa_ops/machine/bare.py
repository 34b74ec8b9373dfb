"""What a bare machine has and what was made on it already, asked with nothing but its `sh`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nsa_ops.errors import VerificationError
from nsa_ops.machine.host import VERSION, HostFacts
from nsa_ops.quantities import parse_count
from nsa_ops.remote.transport import Transport

#: Every tool that is asked has a deadline of its own within this one.
BARE_S = 60.0
TOOLS = ("git", "tmux", "rsync", "uv", "cc", "nvidia-smi", "find")
FOLDERS = ("code", "runs", "data", "caches", "environments", "source")
#: The script that runs an environment's interpreter with the pod's caches; see the plan.
LAUNCHER = "run-python"

SCRIPT = r"""
root=$1; code_id=$2; commit=$3; shift 3
say() { name=$1; shift; printf '%s' "$name"; printf '\t%s' "$@"; printf '\n'; }
sum() { [ -f "$1" ] && sha256sum <"$1" | cut -d' ' -f1; }
soon() { if command -v timeout >/dev/null; then timeout "$@"; else shift; "$@"; fi; }
number() { awk "$@" 2>/dev/null; }

say uid "$(id -u)"
for tool in git tmux rsync uv cc nvidia-smi find; do say tool "$tool" "$(command -v "$tool")"; done
if ! command -v apt-get >/dev/null; then say rights none
elif [ "$(id -u)" = 0 ]; then say rights root
elif soon 10 sudo -n true </dev/null >/dev/null 2>&1; then say rights sudo
else say rights none
fi

for python in "$@" "$root"/python/*/bin/python3 python3 python3.14 python3.13 python3.12 \
  python3.11 python /opt/conda/bin/python3; do
  path=$(command -v "$python") || continue
  case $path in "$root"/environments/*) continue ;; esac
  found=$(soon 10 "$path" -I -c '
import importlib.util, os, sys, sysconfig
print(".".join(map(str, sys.version_info[:3])),
      int(importlib.util.find_spec("ensurepip") is not None),
      int(os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h"))), sep="\t")
' 2>/dev/null) && say python "$path" "$found"
done

folder=$root
while [ ! -d "$folder" ]; do folder=$(dirname "$folder"); done
if [ -w "$folder" ]; then say disk "$folder" 1; else say disk "$folder" 0; fi
say disk_free "$(df -Pk "$folder" | number 'NR == 2 { printf "%.0f", $4 * 1024 }')"
say shm_free "$(df -Pk /dev/shm 2>/dev/null | number 'NR == 2 { printf "%.0f", $4 * 1024 }')"
say memory_free "$(number '/^MemAvailable:/ { printf "%.0f", $2 * 1024 }' /proc/meminfo)"
say open_files "$(ulimit -Sn)"
say clock "$(date +%s.%N)"
synchronised=$(soon 5 timedatectl show --property NTPSynchronized --value 2>/dev/null) ||
  synchronised=$(soon 5 chronyc -n tracking 2>/dev/null | number '/^Leap status/ { print $4 }')
say synchronised "$synchronised"
smi() { soon 20 nvidia-smi --query-gpu="$1" --format=csv,noheader 2>/dev/null | head -n 1; }
say card "$(smi name)"
say driver "$(smi driver_version)"

for name in code runs data caches environments source; do
  [ -d "$root/$name" ] && say folder "$name"
done
[ -f "$root/code/$code_id/CODE_ID" ] && say has_code
say source "$(sum "$root/source/$commit.bundle")" "$(sum "$root/source/$code_id.diff")"
for made in "$root"/environments/*/made-from-train; do
  place=$(dirname "$made")
  "$place/bin/python" -I -c '' 2>/dev/null || continue
  flash=$(cat "$place/flash-attn" 2>/dev/null)
  say environment "$(basename "$place")" "$(sum "$place/bin/run-python")" "$flash"
done
[ -f "$root/provision.json" ] && say receipt "$(cat "$root/provision.json")"
exit 0
"""

Rights = Literal["root", "sudo", "none"]


@dataclass(frozen=True)
class BasePython:
    """An interpreter that was there before us."""

    path: str
    version: str  # such as 3.11.2
    has_venv: bool  # it can make virtual environments by itself
    has_headers: bool  # its C headers are there; Triton compiles its launchers against them

    @property
    def pair(self) -> tuple[int, int]:
        """Major and minor version."""
        major, minor, *_ = self.version.split(".")
        return int(major), int(minor)


@dataclass(frozen=True)
class MadeEnvironment:
    """An environment of ours that is whole."""

    name: str  # its folder, which says what it was made from
    launcher_sha256: str = ""  # hash of its launcher; empty if there is none
    #: Wheel that was installed into it, as `NAME SHA256`; empty if none was.
    flash_attention: str = ""


@dataclass(frozen=True)
class BareFacts:
    """A machine before, during and after its set-up; None and empty where unknown."""

    uid: int
    rights: Rights  # how packages can be installed: as root, by a sudo without password, or not
    tools: dict[str, str]  # path of each that is there
    pythons: tuple[BasePython, ...]  # the one that was asked for first
    disk_path: str  # where the root is or will be
    disk_writable: bool
    unix_s: float
    disk_free_bytes: int | None = None
    shm_free_bytes: int | None = None
    memory_free_bytes: int | None = None
    open_files_limit: int | None = None  # soft limit; -1 for none
    is_synchronised: bool | None = None  # its clock, with a time server
    card: str = ""  # name of the first one
    driver: str = ""
    folders: frozenset[str] = frozenset()  # of ours that are there
    has_code: bool = False  # this version of the code is there
    bundle_sha256: str = ""  # of the pinned source; empty if it is not there
    diff_sha256: str = ""
    environments: tuple[MadeEnvironment, ...] = ()  # that are whole
    receipt: str = ""  # of the last provisioning, unread

    def environment(self, name: str) -> MadeEnvironment | None:
        """A whole environment by name."""
        return next((one for one in self.environments if one.name == name), None)

    def as_host(self, python_version: str) -> HostFacts:
        """The same facts in the form that preflight judges."""
        return HostFacts(
            python_version=python_version,
            memory_free_bytes=self.memory_free_bytes,
            disk_free_bytes=self.disk_free_bytes,
            disk_path=self.disk_path,
            disk_writable=self.disk_writable,
            shm_free_bytes=self.shm_free_bytes,
            open_files_limit=self.open_files_limit,
            tools={name: self.tools.get(name) for name in TOOLS},
            unix_s=self.unix_s,
        )


def parse_bare(stdout: str) -> BareFacts:
    """Facts from the script's answer; lines of another form are passed over.

    Raises:
        ValueError: If a value is missing that every machine has.
    """
    said: dict[str, list[list[str]]] = {}
    for line in stdout.splitlines():
        name, *values = line.split("\t")
        said.setdefault(name, []).append(values)

    def first(name: str, place: int = 0) -> str:
        values = said.get(name, [[]])[0]
        return values[place] if len(values) > place else ""

    rights = first("rights")
    return BareFacts(
        uid=int(first("uid")),
        rights="root" if rights == "root" else "sudo" if rights == "sudo" else "none",
        tools={name: path for name, path, *_ in _of(said, "tool", 2) if path},
        pythons=_pythons(said),
        disk_path=first("disk"),
        disk_writable=first("disk", 1) == "1",
        unix_s=float(first("clock").removesuffix(".N")),  # a `date` without nanoseconds prints N
        disk_free_bytes=parse_count(first("disk_free")),
        shm_free_bytes=parse_count(first("shm_free")),
        memory_free_bytes=parse_count(first("memory_free")),
        open_files_limit=-1
        if first("open_files") == "unlimited"
        else parse_count(first("open_files")),
        is_synchronised=_SYNCHRONISED.get(first("synchronised").strip().lower()),
        card=first("card"),
        driver=first("driver"),
        folders=frozenset(values[0] for values in _of(said, "folder", 1)),
        has_code="has_code" in said,
        bundle_sha256=first("source"),
        diff_sha256=first("source", 1),
        environments=tuple(MadeEnvironment(*values[:3]) for values in _of(said, "environment", 3)),
        receipt=first("receipt"),
    )


#: `timedatectl` says yes or no, `chronyc` says normal.
_SYNCHRONISED = {"yes": True, "normal": True, "no": False, "not": False}


def _of(said: dict[str, list[list[str]]], name: str, count: int) -> list[list[str]]:
    return [values for values in said.get(name, []) if len(values) >= count]


def _pythons(said: dict[str, list[list[str]]]) -> tuple[BasePython, ...]:
    found: dict[str, BasePython] = {}
    for path, version, venv, headers, *_ in _of(said, "python", 4):
        if re.match(VERSION, version):
            found.setdefault(path, BasePython(path, version, venv == "1", headers == "1"))
    return tuple(found.values())


def read_bare(
    transport: Transport, root: str, *, code_id: str, commit: str, pythons: Sequence[str] = ()
) -> BareFacts:
    """Ask a machine everything that provisioning decides on, in one round trip.

    Args:
        transport: Of the pod.
        root: Folder of ours there.
        code_id: Version of the code that is to be there.
        commit: Commit whose bundle is to be there.
        pythons: Interpreters to look at before those on PATH.

    Raises:
        VerificationError: If it gives no answer that can be read.
    """
    argv = ("sh", "-c", SCRIPT, "sh", root, code_id, commit, *pythons)
    done = transport.run(argv, timeout_s=BARE_S)
    try:
        return parse_bare(done.text)
    except ValueError as error:
        said = done.last_error_line or "nothing"
        message = f"The facts of {transport.where} cannot be read: {said}"
        raise VerificationError(message, hint="See that `sh` and `awk` work there") from error
