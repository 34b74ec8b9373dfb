"""Gate and selection figures of a training step, in the fields of a heartbeat."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from nsa_core.config.run import RunConfig
from nsa_core.model.transformer import LanguageModel


def gates_are_due(config: RunConfig, step: int) -> bool:
    """Whether the figures of this step will be logged."""
    telemetry = config.telemetry
    has_gates = config.model.attention == "nsa"
    return has_gates and step % telemetry.log_every == 0 and step % telemetry.gate_every == 0


@contextmanager
def record_gates(model: LanguageModel, *, is_wanted: bool) -> Iterator[None]:
    """Record the forward passes of the body, if wanted."""
    if not is_wanted:
        yield
        return
    with model.recording_statistics():
        yield


def read_gate_fields(model: LanguageModel) -> dict[str, Any]:
    """The worst layer's figures, and all layers under `gate_layers`; waits for the card."""
    statistics = model.gate_statistics()
    if statistics is None:
        return {}
    worst = statistics.worst
    return {
        "gate_entropy_mean": worst.entropy_mean,
        "gate_entropy_min": worst.entropy_min,
        "gate_max_gate": worst.max_gate,
        "gate_collapse_frac": worst.collapse_frac,
        "gate_branch_shares": list(worst.branch_shares),
        "gate_worst_layer": worst.layer,
        "selected_blocks": worst.selected_blocks,
        "free_block_share": worst.free_block_share,
        "gate_layers": [asdict(layer) for layer in statistics.layers],
    }
