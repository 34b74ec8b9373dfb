"""Ranks of several pods, each of which has a manifest of its own."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from nsa_core.config.run import RunConfig
from nsa_core.rundir.exit import TrainerExit
from nsa_core.rundir.manifest import RunManifest
from nsa_core.train.failure import TrainerConfigurationError
from nsa_core.train.same_run import require_same_run
from nsa_core.train.session import prepare
from tests.core.train.thread_ranks import ThreadRank, run_both


def manifest_of(pod: int, config: RunConfig | None = None, **changes: object) -> RunManifest:
    """What a pod has; the facts of each differ."""
    return RunManifest(
        run_id="r1", attempt_id="a" * 32, code_id="c1", config=config or RunConfig(),
        config_sha256="0" * 64, created_unix_s=pod, pod_id=str(pod), pod_facts={"pod": pod},
    ).model_copy(update=changes)  # fmt: skip


def found_by_both(other: RunManifest) -> list[object]:
    manifests = [manifest_of(0), other]
    return run_both(lambda group: require_same_run(group, manifests[group.place.rank]))


def test_pods_of_one_attempt_differ_in_their_own_facts_alone() -> None:
    assert found_by_both(manifest_of(1)) == [None, None]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"optimizer": {"learning_rate": 0.001}}, "optimizer.learning_rate 0.001, not 0.0006"),
        ({"seed": 4}, "seed 4, not 1337"),
        ({"schedule": {"steps": 9}}, "schedule.steps 9, not 50000"),
        ({"checkpoint": {"save_every": 2}}, "checkpoint.save_every 2, not 1000"),
        ({"data": {"cache_dir": "other"}}, "data.cache_dir other, not data"),
    ],
)
def test_a_rank_with_another_configuration_ends_all_of_them(changed, says) -> None:
    """Seen before: both trained to the end, each at its own learning rate, and saved it."""
    for error in found_by_both(manifest_of(1, RunConfig.model_validate(changed))):
        assert isinstance(error, TrainerConfigurationError)
        assert (error.code, error.is_shared) == (TrainerExit.CONFIGURATION, True)
        assert str(error) == f"rank 1 does not run what rank 0 runs: {says}"


@pytest.mark.parametrize(
    ("key", "value"),
    [("code_id", "c2"), ("run_id", "r2"), ("attempt", 2), ("attempt_id", "b" * 32)],
)
def test_a_rank_of_another_attempt_or_code_ends_all_of_them(key, value) -> None:
    for error in found_by_both(manifest_of(1, **{key: value})):
        assert isinstance(error, TrainerConfigurationError)
        assert f": {key} {value}, not " in str(error)


def test_it_is_compared_before_a_rank_prepares_anything() -> None:
    manifests = [manifest_of(0), manifest_of(1, RunConfig(seed=4))]

    def begin(group: ThreadRank) -> object:
        context: Any = SimpleNamespace(group=group, manifest=manifests[group.place.rank])
        return prepare(context, cast("Any", None), cast("Any", None))

    assert {type(error) for error in run_both(begin)} == {TrainerConfigurationError}
