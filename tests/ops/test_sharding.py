"""How the ranks of a run keep its state, as the estimate decides it."""

import pytest
from pydantic import ValidationError

from nsa_core.config.base import ConfigError
from nsa_core.config.recipe import resolve
from nsa_core.config.step_memory import MEMORY_SHARE, estimate_step
from nsa_ops.estimate import choose_sharding


def config_of(*sets: str):
    return resolve("m7c-1b", None, ["runtime.num_gpus=4", *sets]).config


def test_fsdp_is_chosen_exactly_where_ddp_does_not_fit() -> None:
    config = config_of()
    fits_gib = estimate_step(config, "ddp").total / 1024 / MEMORY_SHARE
    assert choose_sharding(config, fits_gib + 0.1)[0] == "ddp"
    chosen, why = choose_sharding(config, fits_gib - 0.1)
    assert chosen == "fsdp"
    part_gib = estimate_step(config, "fsdp").total / 1024
    assert f"of fsdp on 4 cards {part_gib:.1f} GiB" in why


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["optimizer.kind=muon"], "Muon needs whole matrices"),
        (["runtime.precision=fp16"], "loss scale"),
        (["runtime.num_pods=2"], "parts of a checkpoint"),
    ],
)
def test_what_cannot_be_sharded_stays_with_ddp_and_is_refused_as_fsdp(
    sets: list[str], words: str
) -> None:
    chosen, why = choose_sharding(config_of(*sets), 16.0)
    assert chosen == "ddp"
    assert words in why
    with pytest.raises((ConfigError, ValidationError), match=words):
        config_of(*sets, "runtime.sharding=fsdp")


def test_a_choice_by_name_and_a_single_rank_are_kept() -> None:
    assert choose_sharding(config_of("runtime.sharding=ddp"), 1.0)[0] == "ddp"
    assert choose_sharding(config_of("runtime.sharding=fsdp"), 1000.0)[0] == "fsdp"
    assert choose_sharding(config_of("runtime.num_gpus=1"), 1.0)[0] == "ddp"
    assert choose_sharding(config_of(), None)[0] == "ddp"
