"""Files that describe a run as a whole.

env.json and config.yaml are written when an attempt begins, metrics.json and goodput.json at every
checkpoint and at the end, samples.json and model.safetensors when the run is finished.
"""

import importlib.metadata
import json
import platform
import time
from dataclasses import asdict
from typing import Any

import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import save_file

from nsa_core.env import recorded_environment
from nsa_core.evaluate.sampling import Sampling, stream
from nsa_core.model.transformer import LanguageModel
from nsa_core.model.weights import model_tensors
from nsa_core.rundir.atomic import fsync_dir, fsync_file, write_text
from nsa_core.rundir.goodput import write_goodput
from nsa_core.rundir.layout import RunDir
from nsa_core.train.checkpoint_files import advise, is_disk_full, to_host
from nsa_core.train.failure import DiskFullError
from nsa_core.train.session import TrainingSession
from nsa_core.train.tables import VALIDATION_COLUMNS
from nsa_core.train.telemetry import AttemptContext

PACKAGES = ("torch", "triton", "numpy", "safetensors", "pydantic", "tensorboard", "flash-attn")


def write_environment(context: AttemptContext) -> None:
    """Write env.json and config.yaml; a full disk costs them, not the run."""
    run, manifest, writes = context.run, context.manifest, context.telemetry.writes
    facts = read_facts() | {
        "run_id": manifest.run_id,
        "attempt": manifest.attempt,
        "code_id": manifest.code_id,
        "code_commit": manifest.code_commit,
        "dirty_sha256": manifest.dirty_sha256,
        "lock_sha256": manifest.lock_sha256,
    }
    writes.attempt("env.json", lambda: write_text(run.env, json.dumps(facts, indent=2) + "\n"))
    text = yaml.safe_dump(manifest.config.model_dump(mode="json"), sort_keys=False)
    writes.attempt("config.yaml", lambda: write_text(run.config, text))


def read_facts() -> dict[str, Any]:
    """Versions, cards and the environment that matters; no host name, no secret."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "cards": _read_cards(),
        "threads": torch.get_num_threads(),
        "environment": recorded_environment(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read_cards() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    cards = []
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        cards.append(
            {
                "name": found.name,
                "uuid": str(found.uuid),
                "memory_mib": found.total_memory // 2**20,
                "capability": f"{found.major}.{found.minor}",
            }
        )
    return cards


def write_summary(session: TrainingSession, *, is_final: bool = False) -> None:
    """Replace metrics.json and goodput.json; a full disk costs them, not the run."""
    if not session.context.group.is_first:
        return
    run, writes = session.context.run, session.telemetry.writes
    goodput = session.clock.read(attempt=session.context.manifest.attempt, step=session.step)
    writes.attempt("goodput.json", lambda: write_goodput(run, goodput))
    metrics = _metrics(session) | {"goodput": goodput.goodput, "is_final": is_final}
    text = json.dumps(metrics, indent=2) + "\n"
    writes.attempt("metrics.json", lambda: write_text(run.metrics, text))


def _metrics(session: TrainingSession) -> dict[str, Any]:
    validations = _read_validations(session.context.run)
    rate = session.telemetry.median_tokens_per_s
    return {
        "schema_version": 1,
        "run_id": session.context.manifest.run_id,
        "attempt": session.context.manifest.attempt,
        "updated_unix_s": time.time(),
        "step": session.step,
        "steps": session.config.schedule.steps,
        "tokens_seen": session.position.tokens_seen,
        "num_parameters": session.model.num_parameters(),
        "tokens_per_s": rate,
        "mfu": session.meter.mfu(rate),
        "skipped_steps": session.num_skipped,
        "validation_first": validations[0] if validations else None,
        "validation_last": validations[-1] if validations else None,
        "bits_per_byte_best": min((row["bits_per_byte"] for row in validations), default=None),
        "checkpoints": {
            **{k: round(v, 4) for k, v in asdict(session.keeper.statistics).items()},
            "last_step": session.keeper.whole_step,
            "known_good_step": session.keeper.known_good,
        },
        "recall": asdict(session.recall) if session.recall is not None else None,
        "telemetry_lines_lost": session.telemetry.writes.num_lost,
        "kernel_paths": session.model.kernel_paths,
    }


def _read_validations(run: RunDir) -> list[dict[str, float]]:
    """Rows of val.csv, oldest first, of all attempts; damaged rows are skipped."""
    try:
        with run.validation_csv.open(encoding="utf-8", errors="replace", newline="") as file:
            found = [_parse_validation(line) for line in file]
    except OSError:
        return []
    return [row for row in found if row is not None]


def _parse_validation(line: str) -> dict[str, float] | None:
    cells = dict(zip(VALIDATION_COLUMNS, line.strip().split(","), strict=False))
    try:
        return {
            "step": int(cells["step"]),
            "val_loss": float(cells["val_loss"]),
            "bits_per_byte": float(cells["bits_per_byte"]),
        }
    except (KeyError, ValueError):  # the header, or no row
        return None


#: Greedy text shows what the model is sure of; the draw shows what it has learned beside it.
SAMPLINGS = (Sampling(), Sampling(temperature=0.8, top_p=0.95, seed=0))


def write_samples(session: TrainingSession, model: LanguageModel) -> None:
    """Continue the configured prompt; 0 tokens write nothing. A full disk costs the file."""
    if session.config.evaluation.sample_tokens == 0:
        return
    found = [_sample(session, model, sampling) for sampling in SAMPLINGS]
    text = json.dumps(found, indent=2, ensure_ascii=False) + "\n"
    session.telemetry.writes.attempt(
        "samples.json", lambda: write_text(session.context.run.samples, text)
    )


def _sample(session: TrainingSession, model: LanguageModel, sampling: Sampling) -> dict[str, Any]:
    evaluation, tokenizer = session.config.evaluation, session.tokenizer
    prompt = [int(token) for token in tokenizer.encode(evaluation.sample_prompt)]
    new = list(
        stream(
            model,
            prompt or [tokenizer.end_id],  # an empty prompt asks for the beginning of a document
            max_new_tokens=evaluation.sample_tokens,
            sampling=sampling,
            stop_token=tokenizer.end_id,
        )
    )
    return {
        "step": session.step,
        "prompt": evaluation.sample_prompt,
        "text": tokenizer.decode(new),
        "num_tokens": len(new),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
    }


def write_final_model(run: RunDir, model: LanguageModel) -> None:
    """model.safetensors, whole or not at all, also after a power cut.

    Raises:
        DiskFullError: If the disk refuses; the checkpoint of the last step is whole.
    """
    temporary = run.final_model.with_name(f".{run.final_model.name}.writing")
    try:
        save_file(to_host(model_tensors(model)), temporary)
        temporary.chmod(0o644)
        fsync_file(temporary)
        temporary.replace(run.final_model)
        fsync_dir(run.root)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        full = " (the disk is full)" if is_disk_full(error) else ""
        message = f"{run.final_model.name} could not be written{full}: {error}"
        raise DiskFullError(
            message,
            has_checkpoint=True,
            hint=f"{advise(error)}, then `nsa-ops resume`: the last step is saved",
        ) from error
