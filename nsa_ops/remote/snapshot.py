"""Pin the code: which files a run is made of, their hash, and how they get to the pod whole."""

import errno
import hashlib
import io
import os
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from nsa_ops.errors import LocalResourceError, VerificationError
from nsa_ops.quantities import count_of
from nsa_ops.remote.transport import Transport

_PACKAGES = ("nsa_core", "nsa_ops")
_DATA = ("profiles", "runbooks", "requirements", "tools")
_SINGLE = ("pyproject.toml",)
#: What is shipped, as paths below the root.
SCOPE = (*_PACKAGES, *_DATA, *_SINGLE)
_SKIPPED_FOLDERS = {"__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
_SHIP_S = 120.0
_GIT_S = 20.0
_ID_LENGTH = 16

#: Unpacks the archive on its stdin into code/<id> by one rename, after checking every hash. It is
#: sent as text, because no code of ours is on the pod yet; Python 3.9 or later runs it.
RECEIVE = """
import hashlib, io, os, shutil, sys, tarfile, tempfile
target, code_id = sys.argv[1], sys.argv[2]
if os.path.isfile(os.path.join(target, "CODE_ID")):
    print("already"); sys.exit(0)
parent = os.path.dirname(target)
os.makedirs(parent, exist_ok=True)
temporary = tempfile.mkdtemp(prefix=".code-", dir=parent)
try:
    digest = hashlib.sha256()
    with tarfile.open(fileobj=io.BytesIO(sys.stdin.buffer.read())) as archive:
        for member in sorted(archive.getmembers(), key=lambda one: one.name):
            path = os.path.normpath(os.path.join(temporary, member.name))
            if not member.isfile() or not path.startswith(temporary + os.sep):
                sys.exit("unexpected member " + member.name)
            content = archive.extractfile(member).read()
            digest.update(member.name.encode() + b"\\0" + hashlib.sha256(content).digest())
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(content); file.flush(); os.fsync(file.fileno())
    if digest.hexdigest()[:len(code_id)] != code_id:
        sys.exit("the code arrived with hash " + digest.hexdigest() + " instead of " + code_id)
    with open(os.path.join(temporary, "CODE_ID"), "w") as file:
        file.write(code_id + "\\n"); file.flush(); os.fsync(file.fileno())
    os.chmod(temporary, 0o755)
    try:
        os.rename(temporary, target)
    except OSError:
        if not os.path.isfile(os.path.join(target, "CODE_ID")):
            raise
    print("shipped")
finally:
    shutil.rmtree(temporary, ignore_errors=True)
"""


@dataclass(frozen=True)
class Snapshot:
    """The code as it is now.

    Attributes:
        root: Folder the files are below.
        files: Names relative to it, sorted.
        code_id: First 16 hex digits of the hash over all names and contents.
        commit: Git commit; `unknown` outside a checkout.
        dirty_sha256: Hash of the uncommitted difference of these files; empty if there is none.
        lock_sha256: Hash of the lock files; empty if there are none.
        total_bytes: Size of all files.
    """

    root: Path
    files: tuple[str, ...]
    code_id: str
    commit: str
    dirty_sha256: str
    lock_sha256: str
    total_bytes: int

    @property
    def size(self) -> str:
        """How much there is to ship, for a plan."""
        return f"{count_of(len(self.files), 'file')}, {self.total_bytes // 1024} KiB"


def code_root() -> Path:
    """Folder that holds the packages which run this very command."""
    return Path(__file__).parents[2]


def take_snapshot(root: Path | None = None) -> Snapshot:
    """Hash the code that runs this command, or that below a folder.

    Raises:
        LocalResourceError: If a file cannot be read.
    """
    base = root or code_root()
    names = sorted(_names(base))
    digest, total_bytes = hashlib.sha256(), 0
    try:
        for name in names:
            content = (base / name).read_bytes()
            total_bytes += len(content)
            digest.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
    except OSError as error:
        message = f"The code to ship cannot be read: {error}"
        raise LocalResourceError(message) from error
    return Snapshot(
        root=base,
        files=tuple(names),
        code_id=digest.hexdigest()[:_ID_LENGTH],
        commit=_git(base, "rev-parse", "HEAD").decode().strip() or "unknown",
        dirty_sha256=_dirty_sha256(base),
        lock_sha256=_lock_sha256(base, names),
        total_bytes=total_bytes,
    )


def _names(base: Path) -> Iterator[str]:
    for single in _SINGLE:
        if (base / single).is_file():
            yield single
    for package in (*_PACKAGES, *_DATA):
        for path in (base / package).rglob("*"):
            parts = path.relative_to(base).parts
            if path.is_file() and not _SKIPPED_FOLDERS & set(parts) and path.suffix != ".pyc":
                yield PurePosixPath(*parts).as_posix()


def _git(base: Path, *words: str) -> bytes:
    """Output of git in a folder; empty where git or a checkout is missing."""
    if not (base / ".git").exists():
        return b""
    try:
        done = subprocess.run(
            ["git", "-C", str(base), *words], capture_output=True, timeout=_GIT_S, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return b""
    return done.stdout if done.returncode == 0 else b""


def _dirty_sha256(base: Path) -> str:
    scope = ("--", *SCOPE)
    status = _git(base, "status", "--porcelain", "--untracked-files=all", *scope)
    if not status.strip():
        return ""
    difference = _git(base, "diff", "HEAD", "--binary", *scope)
    return hashlib.sha256(status + difference).hexdigest()


def _lock_sha256(base: Path, names: list[str]) -> str:
    locks = [name for name in names if name.endswith(".lock")]
    if not locks:
        return ""
    return hashlib.sha256(b"".join((base / name).read_bytes() for name in locks)).hexdigest()


def pack(snapshot: Snapshot) -> bytes:
    """The files as a tar archive that is the same for the same content."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in snapshot.files:
            content = (snapshot.root / name).read_bytes()
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o644
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def ship(snapshot: Snapshot, transport: Transport, python: str, target: PurePosixPath) -> bool:
    """Put the code on the pod, whole and checked; a second time moves nothing.

    Args:
        snapshot: What to ship.
        transport: How to reach the pod.
        python: Interpreter on the pod.
        target: Folder to make, named by the code id.

    Returns:
        Whether anything was moved.

    Raises:
        LocalResourceError: If the disk there is full.
        VerificationError: If it could not be unpacked, or arrived with another hash.
    """
    if has_code(transport, python, target):
        return False
    argv = (python, "-I", "-c", RECEIVE, str(target), snapshot.code_id)
    done = transport.run(argv, stdin=pack(snapshot), timeout_s=_SHIP_S)
    if done.exit_code != 0:
        message = f"The code could not be put on {transport.where}: {done.last_error_line}"
        if os.strerror(errno.ENOSPC) in done.last_error_line:
            raise LocalResourceError(message, hint=f"Free space in `{target.parent}`")
        raise VerificationError(
            message, hint=f"Check that `{target.parent}` is writable and has free space"
        )
    return done.stdout.strip() == b"shipped"


def has_code(transport: Transport, python: str, target: PurePosixPath) -> bool:
    """Whether this version of the code is whole on the pod already."""
    probe = "import os, sys; sys.exit(not os.path.isfile(sys.argv[1]))"
    argv = (python, "-I", "-c", probe, str(target / "CODE_ID"))
    return transport.run(argv, timeout_s=_GIT_S).exit_code == 0
