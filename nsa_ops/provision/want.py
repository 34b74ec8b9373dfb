"""What a pod is to have when it is provisioned, where each part lies, and the pinned source."""

import shlex
import subprocess
import tempfile
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath

from nsa_core.config.profile import HardwareProfile
from nsa_core.env import COMPILER_CACHES
from nsa_ops.errors import ConfigurationError, LocalResourceError
from nsa_ops.machine.bare import LAUNCHER
from nsa_ops.provision.receipt import RECEIPT_NAME
from nsa_ops.remote.snapshot import SCOPE, Snapshot

#: Needed by an environment that is still to be made: the CPU one took 1.3 GiB, a CUDA one and the
#: wheels it is made from take about 10.
ENVIRONMENT_BYTES = {"cpu": 4 * 2**30}
CUDA_ENVIRONMENT_BYTES = 14 * 2**30
#: Caches of a run that belong on the pod's own disk, not in a home that a restart loses. What the
#: pod's owner has set already stays. A trainer's compilers get a folder of the run's code in them.
_CACHES = (
    ("HF_HUB_CACHE", "huggingface/hub"),
    ("HF_DATASETS_CACHE", "huggingface/datasets"),
    *COMPILER_CACHES.items(),
)
_LOCK = "requirements/train.lock"
_SETUP = "tools/setup.sh"
_GIT_S = 120.0


@dataclass(frozen=True)
class PinnedSource:
    """What the code was made from; `git clone` of the bundle and `git apply` give it again.

    Attributes:
        commit: Commit; empty outside a checkout, where there is nothing to pin.
        diff: Uncommitted difference of the files that are shipped, new ones included.
    """

    commit: str
    diff: bytes

    @property
    def diff_sha256(self) -> str:
        """Hash of the difference; empty if there is none."""
        return sha256(self.diff).hexdigest() if self.diff else ""


@dataclass(frozen=True)
class FlashWheel:
    """A flash-attn wheel on this machine."""

    path: Path
    sha256: str

    @property
    def mark(self) -> str:
        """What the environment remembers of it."""
        return f"{self.path.name} {self.sha256}"


@dataclass(frozen=True)
class Wanted:
    """What is to be there.

    Attributes:
        root: Folder of ours on it.
        python: Interpreter to make the environment with, if one was named.
        profile: What it has to compute with.
        flash: flash-attn wheel to install; None for none.
    """

    pod: str
    pod_id: str
    root: PurePosixPath
    is_local: bool
    python: str
    profile: HardwareProfile
    snapshot: Snapshot
    source: PinnedSource
    flash: FlashWheel | None = None

    @property
    def code(self) -> PurePosixPath:
        """Folder of the code."""
        return self.root / "code" / self.snapshot.code_id

    @property
    def bundle(self) -> PurePosixPath:
        """File of the bundle."""
        return self.root / "source" / f"{self.source.commit}.bundle"

    @property
    def diff(self) -> PurePosixPath:
        """File of the uncommitted difference."""
        return self.root / "source" / f"{self.snapshot.code_id}.diff"

    @property
    def receipt(self) -> PurePosixPath:
        """File of the receipt."""
        return self.root / RECEIPT_NAME

    @property
    def caches(self) -> PurePosixPath:
        """Folder of the caches."""
        return self.root / "caches"

    def environment(self, name: str) -> PurePosixPath:
        """Folder of an environment."""
        return self.root / "environments" / name

    def launcher(self, name: str) -> PurePosixPath:
        """Interpreter of runs in an environment."""
        return self.environment(name) / "bin" / LAUNCHER

    def launcher_text(self, name: str) -> str:
        """The script that starts an environment's interpreter with the pod's caches."""
        lines = ["#!/bin/sh", "# Made by `nsa-ops provision`: this environment's Python."]
        for variable, folder in _CACHES:
            value = shlex.quote(str(self.caches / folder))
            lines.append(f'[ -n "${{{variable}-}}" ] || {variable}={value}; export {variable}')
        python = shlex.quote(str(self.environment(name) / "bin" / "python"))
        return "\n".join([*lines, f'exec {python} "$@"', ""])

    def launcher_sha256(self, name: str) -> str:
        """Hash of that script."""
        return sha256(self.launcher_text(name).encode()).hexdigest()

    def setup_command(self, name: str, python: str, build: str) -> tuple[str, ...]:
        """What makes an environment; the caches of pip and uv let a second attempt continue."""
        caches = [f"{tool}_CACHE_DIR={self.caches / tool.lower()}" for tool in ("PIP", "UV")]
        script = str(self.code / _SETUP)
        words = (str(self.environment(name)), python, build, self.profile.torch_requirement)
        return ("env", *caches, "sh", script, "pod", *words)


def lock_sha256(snapshot: Snapshot) -> str:
    """Hash of what decides on an environment's packages.

    Raises:
        LocalResourceError: If this nsa-ops was installed without its locks.
    """
    lacking = [name for name in (_LOCK, _SETUP) if name not in snapshot.files]
    if lacking:
        message = f"This nsa-ops has no {' and no '.join(f'`{name}`' for name in lacking)}"
        hint = "Run it from a checkout: `git clone` it, then `python -m nsa_ops provision`"
        raise LocalResourceError(message, hint=hint)
    return _hash_locks(snapshot)


def known_lock_sha256(snapshot: Snapshot) -> str:
    """The same; empty where this nsa-ops was installed without its locks."""
    return _hash_locks(snapshot) if _LOCK in snapshot.files else ""


def _hash_locks(snapshot: Snapshot) -> str:
    names = (_LOCK, "requirements/torch.txt")
    return sha256(b"".join((snapshot.root / one).read_bytes() for one in names)).hexdigest()


def read_wheel(path: Path | None) -> FlashWheel | None:
    """Hash a flash-attn wheel on this machine."""
    if path is None:
        return None
    if not path.is_file() or path.suffix != ".whl" or not path.name.startswith("flash_attn-"):
        message = f"`{path}` is not a wheel of flash-attn on this machine"
        hint = "Give a file `flash_attn-….whl` that fits the pod's torch, CUDA and Python"
        raise ConfigurationError(message, hint=hint)
    return FlashWheel(path, sha256(path.read_bytes()).hexdigest())


def read_source(snapshot: Snapshot) -> PinnedSource:
    """The source of a snapshot; empty outside a checkout."""
    if snapshot.commit == "unknown":
        return PinnedSource("", b"")
    return PinnedSource(
        snapshot.commit, _difference(snapshot.root) if snapshot.dirty_sha256 else b""
    )


def make_bundle(root: Path, commit: str) -> bytes:
    """The commit with its history as one file."""
    with tempfile.TemporaryDirectory(prefix="nsa-bundle-") as folder:
        path = Path(folder) / "source.bundle"
        reference = f"refs/heads/nsa-{commit[:12]}"
        # A bundle holds references, not bare commits; this one exists only in the bundle's index.
        _git(Path(folder), "init", "--quiet", "--bare", "at.git")
        bare = Path(folder) / "at.git"
        _git(bare, "fetch", "--quiet", "--no-tags", str(root.absolute()), f"HEAD:{reference}")
        _git(bare, "symbolic-ref", "HEAD", reference)
        _git(bare, "bundle", "create", "--quiet", str(path), "HEAD", reference)
        return path.read_bytes()


def _difference(root: Path) -> bytes:
    """What `git diff HEAD` says once new files count too; the checkout's index is left alone."""
    scope = [name for name in SCOPE if (root / name).exists()]
    objects = root / _git(root, "rev-parse", "--git-path", "objects").decode().strip()
    with tempfile.TemporaryDirectory(prefix="nsa-index-") as folder:
        Path(folder, "objects").mkdir()
        own = (
            f"GIT_INDEX_FILE={folder}/index",
            f"GIT_OBJECT_DIRECTORY={folder}/objects",
            f"GIT_ALTERNATE_OBJECT_DIRECTORIES={objects}",
        )
        _git(root, "read-tree", "HEAD", variables=own)
        _git(root, "add", "--all", "--", *scope, variables=own)
        return _git(root, "diff", "--cached", "--binary", "HEAD", variables=own)


def _git(folder: Path, *words: str, variables: tuple[str, ...] = ()) -> bytes:
    argv = ["env", *variables, "git", "-C", str(folder), *words]
    try:
        done = subprocess.run(argv, capture_output=True, timeout=_GIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        message = f"`git {words[0]}` did not end within {_GIT_S:g} s in `{folder}`"
        raise LocalResourceError(message) from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["nothing"]
        message = f"`git {' '.join(words[:2])}` failed in `{folder}`: {said[-1]}"
        raise LocalResourceError(message, hint="See `git status` in the checkout of nsa-ops")
    return done.stdout
