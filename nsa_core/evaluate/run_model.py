"""Open the trained model of a run directory: verified weights, its configuration, its tokenizer."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from nsa_core.config.backend_policy import ALL_BRANCHES
from nsa_core.config.base import one_line
from nsa_core.config.run import RunConfig
from nsa_core.data.reporting import DataError
from nsa_core.data.shards import MANIFEST_NAME as STAGED_NAME
from nsa_core.data.shards import read_manifest as read_staged
from nsa_core.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from nsa_core.evaluate.device import COMPUTE_DTYPE, choose_device
from nsa_core.kernels.dispatch import choose_backends, device_facts
from nsa_core.model.stored_tensors import read_weights
from nsa_core.model.transformer import LanguageModel
from nsa_core.model.weights import load_model_tensors
from nsa_core.rundir.checkpoint import (
    CONFIG_FILE,
    MODEL_FILE,
    Checkpoint,
    list_checkpoints,
    verify_checkpoint,
)
from nsa_core.rundir.exit import TrainerExit
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.lineage import find_not_own
from nsa_core.rundir.manifest import ManifestError, read_manifest
from nsa_core.terminal import tell as tell_on_stderr

#: Takes one line about what was passed over.
Tell = Callable[[str], None]


class RunModelError(ValueError):
    """The model of a run cannot be opened."""

    def __init__(self, message: str, code: TrainerExit) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class WeightsFile:
    """Weights on the disk and what belongs to them.

    Attributes:
        path: A file, or the folder of a checkpoint in shards.
        step: Optimizer steps done; None for the final weights, which do not say it.
        tokenizer_fingerprint: Tokenizer of the checkpoint; empty where it was not recorded.
    """

    path: Path
    config: RunConfig
    step: int | None
    tokenizer_fingerprint: str = ""


@dataclass(frozen=True, eq=False)
class RunModel:
    """A model ready to be evaluated, in eval mode on its device."""

    model: LanguageModel
    tokenizer: Tokenizer
    weights: WeightsFile
    device: torch.device


def open_by_flags(arguments: Namespace) -> RunModel:
    """Open the model that `terminal.add_run_flags` asked for, and print on stderr which it is.

    Raises:
        RunModelError: As `open_run_model`.
        ValueError: If CUDA is asked for and there is no card.
    """
    opened = open_run_model(
        RunDir(arguments.run.resolve()),
        choose_device(arguments.device),
        tell=tell_on_stderr,
        step=arguments.step,
        tokenizer_folder=arguments.tokenizer,
    )
    tell_on_stderr(f"weights: {opened.weights.path} on {opened.device}")
    return opened


def open_run_model(
    run: RunDir,
    device: torch.device,
    *,
    tell: Tell,
    step: int | None = None,
    tokenizer_folder: Path | None = None,
) -> RunModel:
    """Load the newest whole checkpoint of a run, or its final weights where it kept none.

    `tell` gets a line for each checkpoint that was passed over, and where nothing could be
    verified. Without `tokenizer_folder` the tokenizer of the run, or of its staged data, is used.

    Raises:
        RunModelError: If there are no whole weights, or the tokenizer is not found.
    """
    weights = find_weights(run, tell=tell, step=step)
    tokenizer = find_tokenizer(run, weights, tokenizer_folder)
    config = weights.config
    try:
        dtype = COMPUTE_DTYPE[config.runtime.precision] if device.type == "cuda" else torch.float32
        runtime = config.runtime.model_copy(update=_any_backend(device))
        backends = choose_backends(
            runtime, device_facts(device, dtype, config), config.model.attention
        )
        model = LanguageModel(config.model, backends, seed=config.seed)
        model.has_half_residual = config.runtime.half_residual
        load_model_tensors(model, read_weights(weights.path))
    except (ValueError, OSError, SafetensorError) as error:
        why = str(error) if isinstance(error, SafetensorError) else one_line(error)
        message = f"{weights.path} cannot be loaded: {why}"
        raise RunModelError(message, TrainerExit.CHECKPOINT) from error
    return RunModel(model.to(device).eval(), tokenizer, weights, device)


def _any_backend(device: torch.device) -> dict[str, str]:
    """A run that named a card's kernels is read on a CPU with what a CPU has."""
    if device.type == "cuda":
        return {}
    names = ("backend", *(f"backend_{branch}" for branch in ALL_BRANCHES))
    return dict.fromkeys(names, "auto")


def find_weights(run: RunDir, *, tell: Tell, step: int | None = None) -> WeightsFile:
    """The newest whole checkpoint, hash by hash, else model.safetensors.

    Raises:
        RunModelError: If it is no run directory, or there are no whole weights.
    """
    try:
        manifest = read_manifest(run)
    except (ManifestError, OSError) as error:
        message = f"{one_line(error)}; `nsa-ops run show` names the directory of a run"
        raise RunModelError(message, TrainerExit.CONFIGURATION) from error
    known = list_checkpoints(run)
    for checkpoint in known:
        if step is not None and checkpoint.step != step:
            continue
        foreign = find_not_own(checkpoint.manifest, manifest)
        damage = foreign or verify_checkpoint(checkpoint.path).damage
        if not damage:
            return _from_checkpoint(checkpoint)
        tell(f"{checkpoint.path.name} is damaged and passed over: {damage}")
    if step is not None:
        have = ", ".join(str(checkpoint.step) for checkpoint in known) or "none"
        message = f"{run.root} has no whole checkpoint of step {step}; steps there: {have}"
        raise RunModelError(message, TrainerExit.CHECKPOINT)
    if not run.final_model.is_file():
        message = (
            f"{run.root} has no whole checkpoint ({len(known)} damaged) and no "
            f"{run.final_model.name}; restore one with `nsa-ops backup restore`"
        )
        raise RunModelError(message, TrainerExit.CHECKPOINT)
    tell(f"no whole checkpoint: {run.final_model.name} is used, which has no recorded hash")
    return WeightsFile(run.final_model, manifest.config, step=None)


def _from_checkpoint(checkpoint: Checkpoint) -> WeightsFile:
    try:
        config = RunConfig.model_validate_json((checkpoint.path / CONFIG_FILE).read_bytes())
    except (OSError, ValueError) as error:
        message = f"{checkpoint.path / CONFIG_FILE} cannot be read: {one_line(error)}"
        raise RunModelError(message, TrainerExit.CHECKPOINT) from error
    is_sharded = checkpoint.manifest.num_shards > 0
    return WeightsFile(
        checkpoint.path if is_sharded else checkpoint.path / MODEL_FILE,
        config,
        checkpoint.step,
        checkpoint.manifest.tokenizer_fingerprint,
    )


def find_tokenizer(run: RunDir, weights: WeightsFile, folder: Path | None = None) -> Tokenizer:
    """The tokenizer that the weights were trained with, by its fingerprint.

    A run directory keeps its own, also in a backup; older ones have it in their staged data only.

    Raises:
        RunModelError: If neither has it, or the one named has another.
    """
    name, wanted = weights.config.data.tokenizer, weights.tokenizer_fingerprint
    if folder is None and wanted in {"", ByteTokenizer.fingerprint} and name == "byte":
        return ByteTokenizer()
    cache = run.pod_root.resolve() / weights.config.data.cache_dir
    staged = sorted(path.parent for path in cache.glob(f"*/{STAGED_NAME}"))
    folders = [folder] if folder else [run.data, *staged]
    for candidate in folders:
        tokenizer = _tokenizer_of(candidate, name, wanted)
        if tokenizer is not None:
            return tokenizer
    where = str(folder or cache)
    message = (
        f"the {name} tokenizer {wanted[:12] or 'of the run'} is not in {where}; "
        "name the run's staged data folder with --tokenizer"
    )
    raise RunModelError(message, TrainerExit.DATA)


def _tokenizer_of(folder: Path, name: str, wanted: str) -> Tokenizer | None:
    """The tokenizer of a staged folder if it is the wanted one; words made up by us are bytes."""
    try:
        if (folder / STAGED_NAME).is_file():
            record = read_staged(folder)[0].tokenizer
            if record.fingerprint != wanted and (wanted or record.name != name):
                return None
            name = record.name
        elif name == "byte":
            return None  # bytes leave no file, so only a manifest can say that they are meant
        tokenizer = load_tokenizer(name, folder)
    except (DataError, OSError):
        return None
    return tokenizer if not wanted or tokenizer.fingerprint == wanted else None
