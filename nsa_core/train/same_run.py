"""All ranks run one attempt of one run, also where each pod has a manifest of its own."""

import json

from nsa_core.config.recipe import leaves
from nsa_core.rundir.manifest import RunManifest
from nsa_core.train.failure import TrainerConfigurationError
from nsa_core.train.group import RankGroup


def require_same_run(group: RankGroup, manifest: RunManifest) -> None:
    """Compare what decides the steps with rank 0, before anything else is done together.

    Other learning rates or seeds would only make each rank's weights its own, without a word, and
    other schedules would leave ranks in collectives that nobody else comes to.

    Raises:
        TrainerConfigurationError: On every rank, if one of them has another run, attempt, code or
            configuration than rank 0.
    """
    own = _describe(manifest)
    first = json.loads(group.from_first(json.dumps(own).encode()))
    differing = [key for key in first | own if first.get(key) != own.get(key)]
    if group.add_up([bool(differing)]) == [0]:
        return
    what = "; ".join(
        f"{key} {own.get(key)!s:.80}, not {first.get(key)!s:.80}" for key in differing[:3]
    )
    found = [one.decode() for one in group.gather(what.encode())]
    rank = next(rank for rank, one in enumerate(found) if one)
    message = f"rank {rank} does not run what rank 0 runs: {found[rank]}"
    hint = "Start all pods at once: `nsa-ops launch` and `nsa-ops resume` give them one manifest"
    error = TrainerConfigurationError(message, hint=hint)
    error.is_shared = True
    raise error


def _describe(manifest: RunManifest) -> dict[str, str]:
    """What all manifests of an attempt share; code first, because it may explain the rest."""
    keys = ("code_id", "run_id", "attempt", "attempt_id")
    own = {key: getattr(manifest, key) for key in keys} | leaves(manifest.config)
    return {key: str(value) for key, value in own.items()}
