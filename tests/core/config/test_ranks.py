"""The number of cards and the batch of the ranks that share a step."""

import pytest
from pydantic import ValidationError

from nsa_core.config.base import ConfigError
from nsa_core.config.profile import HardwareProfile, load_profile
from nsa_core.config.ranks import OfferedCards, share_rows
from nsa_core.config.recipe import ResolvedConfig, resolve
from nsa_core.config.step_memory import MEMORY_SHARE, estimate_step

EIGHT = OfferedCards(8, "the pod has 8 cards")


@pytest.mark.parametrize(
    ("rows", "ranks", "shared"),
    [
        ((16, 8), 1, (16, 8)),
        ((16, 8), 8, (16, 8)),
        ((32, 4), 8, (16, 8)),  # the largest that divides, not the smallest
        ((12, 1), 2, (6, 2)),
        ((12, 1), 8, None),
        ((1, 4), 8, None),
    ],
)
def test_ranks_share_the_rows_of_a_step_in_the_largest_micro_batch_that_divides(
    rows: tuple[int, int], ranks: int, shared: tuple[int, int] | None
) -> None:
    assert share_rows(*rows, ranks) == shared


def on_h100(*sets: str, offered: OfferedCards | None = None) -> ResolvedConfig:
    return resolve("m7c-125m", "h100", sets, memory_gib=80, offered=offered)


def test_the_tier_of_a_profile_shrinks_only_as_far_as_the_ranks_need() -> None:
    found = {
        cards: on_h100(f"runtime.num_gpus={cards}").config.batch for cards in (1, 2, 4, 8)
    }  # fmt: skip
    assert {cards: batch.micro_batch for cards, batch in found.items()} == {
        1: 32, 2: 32, 4: 32, 8: 16
    }  # fmt: skip
    assert {batch.tokens_per_step for batch in found.values()} == {262_144}


def test_a_batch_that_the_operator_named_is_never_changed() -> None:
    with pytest.raises(ConfigError, match="3 does not divide among 2 ranks"):
        on_h100("runtime.num_gpus=2", "batch.accumulation=3")
    named = on_h100("runtime.num_gpus=2", "batch.micro_batch=8").config.batch
    assert (named.micro_batch, named.accumulation) == (8, 4)


def test_auto_takes_what_the_pod_has_and_says_why() -> None:
    found = on_h100("runtime.num_gpus=auto", offered=OfferedCards(4, "the pod has 4 cards"))
    assert found.config.num_ranks == 4
    assert found.notes == [
        "runtime.num_gpus auto is 4: the pod has 4 cards, profile h100 allows 8"
    ]  # fmt: skip


def test_auto_takes_a_number_that_divides_the_rows_of_a_step() -> None:
    length = "batch.seq_len=65536"  # 4 rows a step
    found = on_h100("runtime.num_gpus=auto", length, offered=EIGHT)
    assert (found.config.num_ranks, found.config.batch.accumulation) == (4, 4)
    assert "the rows of a step do not divide among 8" in found.notes[0]
    named = on_h100("runtime.num_gpus=auto", "batch.accumulation=6", offered=EIGHT)
    assert named.config.num_ranks == 6
    pods = on_h100("runtime.num_gpus=auto", "runtime.num_pods=2", length, offered=EIGHT)
    assert (pods.config.runtime.num_gpus, pods.config.num_ranks) == (2, 4)


@pytest.mark.parametrize(
    ("profile", "offered", "cards"),
    [
        ("h100", OfferedCards(0, "gpu0 is in use"), 1),
        ("4090", EIGHT, 4),
        ("cpu", OfferedCards(0, "no card"), 0),
    ],
)
def test_auto_stays_within_the_profile(profile: str, offered: OfferedCards, cards: int) -> None:
    recipe = "tiny-cpu" if profile == "cpu" else "m7c-125m"
    found = resolve(recipe, profile, ["runtime.num_gpus=auto"], offered=offered)
    assert found.config.runtime.num_gpus == cards


def test_auto_stays_auto_until_a_pod_is_known() -> None:
    found = on_h100("runtime.num_gpus=auto")
    assert (found.config.runtime.num_gpus, found.notes) == ("auto", [])
    assert found.config.num_ranks == 1


def test_more_cards_than_the_profile_allows_are_refused() -> None:
    with pytest.raises(ConfigError, match="8 is more than the 4 that profile t4 allows"):
        resolve("m7c-125m", "t4", ["runtime.num_gpus=8"])


def test_processes_without_cards_share_the_rows_too() -> None:
    found = resolve("tiny-cpu", "cpu", ["runtime.cpu_ranks=2"])
    assert (found.config.batch.micro_batch, found.config.batch.accumulation) == (4, 2)
    assert found.notes == [
        "batch.micro_batch is 4 instead of 8, so that 2 ranks share the 8 rows of a step: 4 x 2"
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["4090", "a100", "cpu", "h100", "t4", "v100"])
def test_each_profile_says_how_many_cards_it_allows_and_why(name: str) -> None:
    profile = load_profile(name)
    assert profile.max_gpus is not None
    assert profile.reasons["runtime.num_gpus"]
    assert profile.config["runtime"]["num_gpus"] == min(1, profile.max_gpus)


def test_a_value_that_is_no_number_is_left_to_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"batch\.micro_batch"):
        on_h100("batch.micro_batch=many", "runtime.num_gpus=2")


def test_the_micro_batch_of_a_tier_shrinks_for_a_model_that_would_not_fit_the_card() -> None:
    small = resolve("m7c-125m", "h100", memory_gib=80)
    large = resolve("m7c-1b", "h100", memory_gib=80)
    assert (small.config.batch.micro_batch, small.notes) == (32, [])
    batch = large.config.batch
    assert batch.micro_batch < 32
    assert batch.tokens_per_step == small.config.batch.tokens_per_step
    assert large.notes == [
        f"batch.micro_batch is {batch.micro_batch} instead of 32, so that a step fits 80 GiB: "
        f"{batch.micro_batch} x {batch.accumulation} rows"
    ]
    limit_mib = MEMORY_SHARE * 80 * 1024
    assert estimate_step(large.config, "ddp").total <= limit_mib
    twice = resolve(
        "m7c-1b", "h100",
        [f"batch.micro_batch={2 * batch.micro_batch}", f"batch.accumulation={batch.accumulation}"],
        memory_gib=80,
    ).config  # fmt: skip
    assert twice.batch.micro_batch == 2 * batch.micro_batch  # it was named
    assert estimate_step(twice, "ddp").total > limit_mib


def test_a_batch_that_fits_only_with_parts_of_the_state_is_cut_for_fsdp() -> None:
    found = resolve("m7c-1b", "4090", ["runtime.num_gpus=2"], memory_gib=24).config
    limit_mib = MEMORY_SHARE * 24 * 1024
    assert estimate_step(found, "ddp").total > limit_mib
    assert estimate_step(found, "fsdp").total <= limit_mib
    whole = ["runtime.num_gpus=2", "runtime.sharding=ddp"]
    assert resolve("m7c-1b", "4090", whole, memory_gib=24).config.batch.micro_batch == 4


@pytest.mark.parametrize(
    "flag",
    [
        "runtime.collective_timeout_s=1e30", "runtime.collective_timeout_s=inf",
        "data.loader_timeout_s=1e15", "watchdog.compile_limit_s=1e15",
        f"runtime.cpu_ranks={10**30}", "runtime.cpu_ranks=257",
    ],
)  # fmt: skip
def test_a_number_that_no_library_takes_is_refused_at_plan_time(flag: str) -> None:
    key = flag.partition("=")[0]
    batch = ("batch.accumulation=257",) if flag.endswith("=257") else ()
    with pytest.raises(ConfigError, match=f"{key}: Input should be (less than|a finite)"):
        resolve("tiny-cpu", "cpu", (flag, *batch))


@pytest.mark.parametrize("value", [True, 1 << 60, float("inf")])
def test_a_profile_allows_a_number_of_cards_and_nothing_like_it(value: object) -> None:
    values = load_profile("a100").model_dump()
    with pytest.raises(ValidationError, match="max_gpus"):
        HardwareProfile.model_validate(values | {"max_gpus": value})
