"""Stage a source into token shards once, crash-safe and resumable, and open what was staged."""

from dataclasses import dataclass, replace
from pathlib import Path

from nsa_core.config.errors import disk_advice
from nsa_core.config.training import DataConfig
from nsa_core.data.build import BuildJob, build_folder
from nsa_core.data.errors import DataError
from nsa_core.data.file_hashes import FileHashes
from nsa_core.data.folder_lock import folder_lock
from nsa_core.data.manifest import MANIFEST_NAME, StagedManifest, StagingPlan, read_manifest
from nsa_core.data.progress import OnProgress, StageProgress, ignore_progress
from nsa_core.data.shards import SplitTokens, verify_shard
from nsa_core.data.sources.base import HashOf, hash_file
from nsa_core.data.sources.make import make_source
from nsa_core.data.tokenizer import Tokenizer
from nsa_core.data.vocabulary import describe_tokenizer, load_tokenizer, tokenizer_identity

HASHES_NAME = ".file_hashes.json"


@dataclass(frozen=True)
class StagedData:
    """Staged tokens, ready to be read.

    Attributes:
        folder: Folder of the shards.
        manifest: What they hold.
        manifest_sha256: Names exactly these tokens; a loader's state is bound to it.
        tokenizer: The tokenizer that made them.
        train: Training tokens as one row; every document ends with `tokenizer.end_id`.
        validation: Tokens of the held-out documents.
        substituted_synthetic: The configured data could not be opened, and these are random words.
        substitution_reason: Why; empty otherwise.
    """

    folder: Path
    manifest: StagedManifest
    manifest_sha256: str
    tokenizer: Tokenizer
    train: SplitTokens
    validation: SplitTokens
    substituted_synthetic: bool = False
    substitution_reason: str = ""


def stage(
    config: DataConfig, root: Path, seed: int, progress: OnProgress = ignore_progress
) -> StagedData:
    """Open the tokens of a configuration, staging them first where that was not done before.

    Args:
        config: Which data and tokenizer.
        root: A relative `config.cache_dir` lies below it.
        seed: Decides the text of the `synthetic` source and nothing else.
        progress: Called often; what it raises stops the staging, and the next call goes on.

    Raises:
        DataError: If the data cannot be used. With `config.synthetic_on_fail` random words take
            its place, and the result says so.
    """
    try:
        return _stage(config, root, seed, progress)
    except DataError as error:
        if not config.synthetic_on_fail:
            raise
        words = config.model_copy(update={"source": "synthetic"})
        staged = _stage(words, root, seed, progress)
        return replace(staged, substituted_synthetic=True, substitution_reason=str(error))


def open_staged(
    folder: Path, *, is_verified: bool = True, progress: OnProgress = ignore_progress
) -> StagedData:
    """Open a staged folder.

    Args:
        folder: A folder that `stage` made.
        is_verified: Compare every shard with its SHA-256 first.
        progress: Called before each shard is verified.

    Raises:
        DataError: If it is missing, damaged, or its tokenizer has changed.
    """
    manifest, sha256 = read_manifest(folder)
    for shard in manifest.shards if is_verified else ():
        progress(StageProgress("verify", detail=shard.name))
        verify_shard(folder, shard)
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
    )


def _stage(config: DataConfig, root: Path, seed: int, progress: OnProgress) -> StagedData:
    if config.source == "synthetic":  # words without meaning need no vocabulary, so no download
        config = config.model_copy(update={"tokenizer": "byte"})
    progress(StageProgress("hash", detail=config.path or config.source))
    cache = root / config.cache_dir
    try:
        cache.mkdir(parents=True, exist_ok=True)
        plan = plan_staging(config, seed, FileHashes(cache / HASHES_NAME, progress))
        folder = cache / f"{plan.source.kind}-{config.tokenizer}-{plan.key()}"
        with folder_lock(cache / f".{folder.name}.lock", progress):
            if not (folder / MANIFEST_NAME).exists():
                build_folder(BuildJob(config, seed, plan, folder, progress))
    except OSError as error:
        message = f"cannot stage into {cache}: {error.strerror or error}"
        raise DataError(
            message, f"{disk_advice(error)}, or choose another data.cache_dir"
        ) from error
    return open_staged(folder, progress=progress)


def plan_staging(config: DataConfig, seed: int, hash_of: HashOf = hash_file) -> StagingPlan:
    """What a staging would be made of.

    Args:
        config: Which data and tokenizer.
        seed: Seed of the synthetic source.
        hash_of: SHA-256 of a file of the source.

    Raises:
        DataError: If there is nothing to stage.
    """
    return StagingPlan(
        source=make_source(config, seed).record(hash_of),
        tokenizer=tokenizer_identity(config),
        max_tokens=config.max_tokens,
        validation_fraction=config.validation_fraction,
        read_ahead=config.document_batch if config.max_tokens else 0,
    )
