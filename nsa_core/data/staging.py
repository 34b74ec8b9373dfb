"""Stage a source into token shards once, crash-safe and resumable, and open what was staged."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from nsa_core.config.base import disk_advice
from nsa_core.config.training import DataConfig
from nsa_core.data.build import BuildJob, build_folder
from nsa_core.data.documents import require_within_limits
from nsa_core.data.file_hashes import FileHashes
from nsa_core.data.reporting import DataError, OnProgress, StageProgress, ignore_progress
from nsa_core.data.shards import (
    ACCOUNT_NAME,
    MANIFEST_NAME,
    SplitTokens,
    StagedManifest,
    StagingPlan,
    older_account,
    read_manifest,
    verify_shards,
)
from nsa_core.data.sources.make import make_source
from nsa_core.data.sources.source import HashOf
from nsa_core.data.staged_before import StagedBefore, find_staged, note_path
from nsa_core.data.tokenizer import (
    Tokenizer,
    describe_tokenizer,
    load_tokenizer,
    tokenizer_identity,
)
from nsa_core.rundir.checkpoint import hash_file
from nsa_core.rundir.data_account import DataAccount, read_account

HASHES_NAME = ".file_hashes.json"
POLL_S = 0.5


@dataclass(frozen=True)
class StagedData:
    """Staged tokens, ready to be read.

    Attributes:
        manifest_sha256: Names exactly these tokens; a loader's state is bound to it.
        train: Training tokens as one row; every document ends with `tokenizer.end_id`.
        account: What was dropped of the data, and why.
        notes: What a run should say about where these tokens come from.
        substituted_synthetic: The configured data could not be opened, and these are random words.
        substitution_reason: Why; empty otherwise.
    """

    folder: Path
    manifest: StagedManifest
    manifest_sha256: str
    tokenizer: Tokenizer
    train: SplitTokens
    validation: SplitTokens
    account: DataAccount
    notes: tuple[str, ...] = ()
    substituted_synthetic: bool = False
    substitution_reason: str = ""


def stage(
    config: DataConfig,
    root: Path,
    seed: int,
    progress: OnProgress = ignore_progress,
    *,
    expected: str = "",
    is_rehashed: bool = False,
) -> StagedData:
    """Open the tokens of a configuration, staging them first where that was not done before.

    A relative `config.cache_dir` lies below `root`; `seed` decides the text of the `synthetic`
    source alone. What `progress` raises stops the staging, and the next call continues it.

    `expected` is the manifest hash of the tokens that a run trained on so far. Where they are whole
    and of this configuration, they are opened, whatever became of the data they were made of: a
    difference is only noted. `is_rehashed` hashes every file again, whatever is remembered of it.

    Raises:
        DataError: If the data cannot be used, or more of it would be dropped than the
            configuration allows. With `config.synthetic_on_fail` random words take its place, and
            the result says so.
    """
    request = _Request(config, root, seed, progress, expected, is_rehashed)
    try:
        return request.stage()
    except DataError as error:
        if not config.synthetic_on_fail:
            raise
        words = config.model_copy(update={"source": "synthetic"})
        staged = replace(request, config=words, expected="").stage()
        return replace(staged, substituted_synthetic=True, substitution_reason=str(error))


def open_staged(
    folder: Path,
    *,
    progress: OnProgress = ignore_progress,
    hashes: FileHashes | None = None,
) -> StagedData:
    """Open a folder that `stage` made; `hashes` spares the shards that it knows.

    Raises:
        DataError: If it is missing, damaged, or its tokenizer has changed.
    """
    manifest, sha256 = read_manifest(folder)
    progress(StageProgress("verify", detail=folder.name))
    known = hashes or FileHashes(folder.parent / HASHES_NAME, progress, is_forgetful=True)
    verify_shards(folder, manifest.shards, known)
    tokenizer = load_tokenizer(manifest.tokenizer.name, folder)
    if describe_tokenizer(tokenizer) != manifest.tokenizer:
        message = f"the tokenizer in {folder} is not the one its shards were made with"
        raise DataError(message, f"delete {folder} and stage again")
    train = [shard for shard in manifest.shards if shard.split == "train"]
    validation = [shard for shard in manifest.shards if shard.split == "validation"]
    return StagedData(
        folder=folder,
        manifest=manifest,
        manifest_sha256=sha256,
        tokenizer=tokenizer,
        train=SplitTokens(folder, train),
        validation=SplitTokens(folder, validation),
        account=_read_account(folder, manifest),
    )


def _read_account(folder: Path, manifest: StagedManifest) -> DataAccount:
    path = folder / ACCOUNT_NAME
    try:
        return read_account(path) or older_account(manifest)
    except (OSError, ValueError) as error:
        message = f"{path} cannot be read: {str(error).splitlines()[0]}"
        raise DataError(message, f"delete {folder} and stage again") from error


@dataclass(frozen=True)
class _Request:
    """One call of `stage`."""

    config: DataConfig
    root: Path
    seed: int
    progress: OnProgress
    expected: str
    is_rehashed: bool

    @property
    def cache(self) -> Path:
        return self.root / self.config.cache_dir

    def stage(self) -> StagedData:
        if self.config.source == "synthetic" and self.config.tokenizer != "byte":
            # words without meaning need no vocabulary, so no download
            byte = self.config.model_copy(update={"tokenizer": "byte"})
            return replace(self, config=byte).stage()
        self.progress(StageProgress("hash", detail=self.config.path or self.config.source))
        hashes = FileHashes(self.cache / HASHES_NAME, self.progress, is_forgetful=self.is_rehashed)
        try:
            self.cache.mkdir(parents=True, exist_ok=True)
            staged = self._continue(hashes) or self._begin(hashes)
        except OSError as error:
            message = f"cannot stage into {self.cache}: {error.strerror or error}"
            raise DataError(
                message, f"{disk_advice(error)}, or choose another data.cache_dir"
            ) from error
        return _saved(hashes, staged)

    def _continue(self, hashes: FileHashes) -> StagedData | None:
        """The tokens that a run trained on so far, if they are here and of this configuration."""
        folder = find_staged(self.cache, self.expected) if self.expected else None
        if folder is None:
            return None
        before = StagedBefore(self.config, self.seed, folder)
        if not before.fits or not (before.is_of_this_path or before.is_gone):
            return None
        staged = open_staged(folder, progress=self.progress, hashes=hashes)
        changes = before.describe_changes(hashes)
        note = f"the run continues with the shards that it began with; since then {changes}"
        return replace(staged, notes=(note,)) if changes else staged

    def _begin(self, hashes: FileHashes) -> StagedData:
        config = self.config
        _refuse_cache_inside(config, self.cache)
        plan = plan_staging(config, self.seed, hashes)
        folder = self.cache / f"{plan.source.kind}-{config.tokenizer}-{plan.key()}"
        with folder_lock(self.cache / f".{folder.name}.lock", self.progress):
            if not (folder / MANIFEST_NAME).exists():
                job = BuildJob(config, self.seed, plan, folder, self.progress, hash_of=hashes)
                build_folder(job)
            note_path(folder, config)
        staged = open_staged(folder, progress=self.progress, hashes=hashes)
        if staged.manifest_sha256 != self.expected:  # a run keeps what it began with
            require_within_limits(config.path or config.source, staged.account, config)
        return staged


def _refuse_cache_inside(config: DataConfig, cache: Path) -> None:
    """Refuse a folder of text that shards are written into: the next start would read them, too."""
    if config.source != "fineweb_edu_local":
        return
    path = Path(config.path)
    if path.is_dir() and cache.resolve().is_relative_to(path.resolve()):
        message = f"data.path {path} holds data.cache_dir {cache}: shards would be read as text"
        raise DataError(
            message, "move the text into a folder of its own, or name another data.cache_dir"
        )


def _saved(hashes: FileHashes, staged: StagedData) -> StagedData:
    """The data, with a note where the hashes could not be remembered: that only costs time."""
    try:
        hashes.save()
    except OSError as error:
        note = f"hashes are not remembered for the next start: {error.strerror or error}"
        return replace(staged, notes=(*staged.notes, note))
    return staged


def plan_staging(config: DataConfig, seed: int, hash_of: HashOf = hash_file) -> StagingPlan:
    """What a staging would be made of."""
    return StagingPlan(
        source=make_source(config, seed).record(hash_of),
        tokenizer=tokenizer_identity(config),
        max_tokens=config.max_tokens,
        validation_fraction=config.validation_fraction,
        read_ahead=config.document_batch if config.max_tokens else 0,
    )


@contextmanager
def folder_lock(path: Path, progress: OnProgress) -> Iterator[None]:
    """Hold an advisory lock; the kernel lets it go when the process ends, however it ends."""
    with path.open("ab") as file:
        while not _try_lock(file.fileno()):
            progress(StageProgress("wait", detail=f"another process stages; it holds {path.name}"))
            time.sleep(POLL_S)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
