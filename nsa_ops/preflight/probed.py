"""What the correctness probes of a preflight were about: the model, and how it is computed."""

import hashlib
import json

from nsa_core.config.run import RunConfig
from nsa_core.rundir.report import Report

#: Key of the hash in a report, which binds pod, code and profile by itself.
PROBED = "probed_sha256"
_COMPUTED = (
    "device", "precision", "backend_compressed", "backend_selected", "backend_sliding",
    "backend_dense", "flash_min_len_compressed", "flash_min_len_sliding", "compile",
    "deterministic",
)  # fmt: skip


def probed_sha256(config: RunConfig) -> str:
    """Hash of the model's sizes and of every choice of precision, kernel and compiler."""
    part = {
        "model": config.model.model_dump(mode="json"),
        "runtime": config.runtime.model_dump(mode="json", include=set(_COMPUTED)),
    }
    return hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()


def note_another_probed(report: Report | None, config: RunConfig) -> list[str]:
    """A warning if the green report proved another model, or other kernels; pure."""
    probed = (report.model_extra or {}).get(PROBED) if report else None
    if probed is None or probed == probed_sha256(config):
        return []
    return [
        "the preflight proved another model or other kernels than this configuration has; prove "
        f"these with `nsa-ops preflight --recipe {config.recipe}` and the same `--set`"
    ]
