"""The pinned source: a git bundle of the commit and the uncommitted difference, by their hashes."""

import hashlib
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from nsa_ops.errors import LocalResourceError
from nsa_ops.remote.snapshot import SCOPE, Snapshot

_GIT_S = 120.0


@dataclass(frozen=True)
class Source:
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
        return hashlib.sha256(self.diff).hexdigest() if self.diff else ""


def read_source(snapshot: Snapshot) -> Source:
    """The source of a snapshot; empty outside a checkout.

    Raises:
        LocalResourceError: If git fails.
    """
    if snapshot.commit == "unknown":
        return Source("", b"")
    return Source(snapshot.commit, _difference(snapshot.root) if snapshot.dirty_sha256 else b"")


def make_bundle(root: Path, commit: str) -> bytes:
    """The commit with its history as one file.

    Raises:
        LocalResourceError: If git fails.
    """
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
