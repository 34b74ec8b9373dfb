"""All ranks run one attempt of one run, also where each pod has a manifest of its own."""

import json
from collections.abc import Mapping

from nsa_core.config.recipe import leaves
from nsa_core.rundir.manifest import RunManifest
from nsa_core.train.failure import TrainerConfigurationError
from nsa_core.train.group import RankGroup


def require_same_run(group: RankGroup, manifest: RunManifest) -> None:
    """Compare what decides the steps of all ranks, before anything else is done together.

    Other learning rates or seeds would only make each rank's weights its own, without a word, and
    other schedules would leave ranks in collectives that nobody else comes to.

    Raises:
        TrainerConfigurationError: On every rank, if one of them has another run, attempt, code or
            configuration than rank 0.
    """
    first, *others = map(json.loads, group.gather(json.dumps(_describe(manifest)).encode()))
    for rank, other in enumerate(others, start=1):
        if other != first:
            raise _refusal(rank, other, first)


def _refusal(
    rank: int, other: Mapping[str, str], first: Mapping[str, str]
) -> TrainerConfigurationError:
    differing = [key for key in {**first, **other} if first.get(key) != other.get(key)]
    what = "; ".join(
        f"{key} {other.get(key)!s:.80}, not {first.get(key)!s:.80}" for key in differing[:3]
    )
    message = f"rank {rank} does not run what rank 0 runs: {what}"
    hint = "Start all pods at once: `nsa-ops launch` and `nsa-ops resume` give them one manifest"
    error = TrainerConfigurationError(message, hint=hint)
    error.is_shared = True
    return error


def _describe(manifest: RunManifest) -> dict[str, str]:
    """What all manifests of an attempt share; code first, because it may explain the rest."""
    keys = ("code_id", "run_id", "attempt", "attempt_id")
    own = {key: getattr(manifest, key) for key in keys} | leaves(manifest.config)
    return {key: str(value) for key, value in own.items()}
