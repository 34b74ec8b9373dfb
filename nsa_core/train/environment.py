"""env.json and config.yaml: what this attempt runs on, and the resolved configuration alone."""

import importlib.metadata
import json
import platform
from typing import Any

import torch
import yaml

from nsa_core.env import recorded_environment
from nsa_core.rundir.atomic import write_text
from nsa_core.train.context import AttemptContext
from nsa_core.train.disk import LossyWrites

PACKAGES = ("torch", "triton", "numpy", "safetensors", "pydantic", "tensorboard", "flash-attn")


def write_environment(context: AttemptContext, writes: LossyWrites) -> None:
    """Write both files anew for this attempt; a full disk costs them, not the run."""
    run, manifest = context.run, context.manifest
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
