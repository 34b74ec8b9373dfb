"""`estimate`: whether a step fits the cards of a profile, and with which change it would."""

import json

import pytest

from nsa_core.config.recipe import resolve
from nsa_core.config.run import find_sharding_obstacle
from nsa_ops.estimate import judge_fit
from tests.ops.cli_case import CommandLine

pytestmark = pytest.mark.usefixtures("own_settings")
GIB_40 = 40_960.0


def estimate(cli: CommandLine, profile: str, *sets: str, json_too: bool = False) -> tuple[int, str]:
    flags = [word for one in sets for word in ("--set", one)]
    more = ["--json"] if json_too else []
    said = cli("estimate", "--recipe", "m7c-1b", "--profile", profile, *flags, *more)
    return said.exit_code, said.out if json_too else said.out + said.err


def test_a_step_that_fits_the_smallest_card_says_so_with_its_limit(cli: CommandLine) -> None:
    code, text = estimate(cli, "a100")
    assert code == 0
    assert "fits           yes: a step needs about 30,683 MiB, and 34,816 of the card's" in text


def test_a_step_that_fits_no_card_is_refused_with_the_setting_that_makes_it_fit(
    cli: CommandLine,
) -> None:
    code, text = estimate(cli, "h100", "batch.micro_batch=64")
    assert code == 3
    assert (
        "error: This run fits no card of its profile: a step needs about 280,120 MiB, and 69,632 "
        "of the card's 81,920 MiB may be used\n\nhint: Set `batch.micro_batch=8`, "
        "`batch.accumulation=32`: a step needs about 55,392 MiB then\n"
    ) in text
    code, text = estimate(cli, "h100", "batch.micro_batch=64", json_too=True)
    document = json.loads(text)
    assert (code, document["ok"], document["errors"][0]["exit_code"]) == (3, False, 3)
    (fit,) = document["data"]["fits"]
    assert fit["need_mib"] > fit["limit_mib"] == 0.85 * fit["memory_mib"]


def test_a_step_that_fits_only_the_larger_card_of_a_profile_names_it_and_is_no_failure(
    cli: CommandLine,
) -> None:
    code, text = estimate(cli, "v100")
    assert (code, "fits           no: " in text) == (0, True)
    assert "16,384 MiB may be used; it fits one of 32,768 MiB\n" in text


def test_without_a_card_nothing_is_said_of_one(cli: CommandLine) -> None:
    code, text = estimate(cli, "cpu")
    assert (code, "fits" in text) == (0, False)


@pytest.mark.parametrize(
    ("sets", "memory_mib", "advice"),
    [
        (("batch.micro_batch=16", "batch.accumulation=2"), GIB_40, "Set `batch.micro_batch="),
        (
            ("batch.micro_batch=1",), 29_000.0,
            "Set `runtime.activation_checkpointing=full`: a step needs about 22,924 MiB then",
        ),
        (("batch.micro_batch=2",), 1_000.0, "Take a card with more memory, more cards with"),
    ],
)  # fmt: skip
def test_the_advice_is_one_that_fits_by_the_same_estimate(
    sets: tuple[str, ...], memory_mib: float, advice: str
) -> None:
    config = resolve("m7c-1b", "a100", ("runtime.num_gpus=1", *sets)).config
    found = judge_fit(config, memory_mib)
    assert not found.is_fitting
    assert found.advice.startswith(advice)
    words = [word.strip("`,:") for word in found.advice.split() if word.startswith("`")]
    if advice.startswith("Set"):
        changed = resolve("m7c-1b", "a100", ("runtime.num_gpus=1", *sets, *words)).config
        assert judge_fit(changed, memory_mib).is_fitting
        assert changed.batch.tokens_per_step == config.batch.tokens_per_step


def test_a_step_that_nothing_makes_fit_names_the_least_that_it_needs() -> None:
    config = resolve("m7c-1b", "a100", ("runtime.num_gpus=1",)).config
    found = judge_fit(config, 1_000.0)
    assert "a step needs about 22,924 MiB even with `batch.micro_batch=1`, " in found.advice


@pytest.mark.parametrize(
    ("profile", "sets"), [("t4", ()), ("a100", ("optimizer.kind=muon",)), ("a100", ())]
)
def test_the_advice_names_fsdp_only_where_the_run_can_take_it(
    profile: str, sets: tuple[str, ...]
) -> None:
    config = resolve("m7c-1b", profile, ("runtime.num_gpus=1", *sets)).config
    is_possible = find_sharding_obstacle(config) is None
    assert is_possible == (profile == "a100" and not sets)
    advice = judge_fit(config, 1_000.0).advice
    assert ("fsdp" in advice) == is_possible
    if not is_possible:
        assert advice.startswith("Take a card with more memory or a smaller model; a step needs")
