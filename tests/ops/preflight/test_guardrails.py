from dataclasses import replace

import pytest

from nsa_core.config.profile import load_profile
from nsa_core.config.recipe import resolve
from nsa_ops.errors import ConfigurationError, RefusedError
from nsa_ops.estimate import GIB, estimate_run
from nsa_ops.preflight.guardrails import (
    GUARDRAILS,
    Subject,
    apply_overrides,
    check_guardrails,
    parse_overrides,
    require_guardrails,
)


def subject(*sets: str, recipe: str = "m7c-125m", profile: str = "a100") -> Subject:
    hardware = load_profile(profile)
    config = resolve(recipe, profile, sets).config
    return Subject(
        config=config,
        profile=hardware,
        estimate=estimate_run(config, hardware),
        disk_free_bytes=1000 * GIB,
        card_memory_mib=81920,
    )


def failing(looked_at: Subject) -> list[str]:
    results = check_guardrails(looked_at)
    return [one.name.removeprefix("guardrail.") for one in results if one.status == "fail"]


def test_the_production_recipe_passes_every_guardrail() -> None:
    assert failing(subject()) == []


@pytest.mark.parametrize(
    ("name", "sets"),
    [
        ("precision", ["runtime.precision=fp32"]),
        ("checkpoints", ["checkpoint.save_every=0"]),
        ("dimensions", ["model.dim=128"]),
        ("dimensions", ["model.num_layers=2"]),
        ("data", ["data.source=synthetic"]),
        ("schedule", ["schedule.warmup_steps=50000"]),
        ("validation", ["evaluation.eval_every=0"]),
    ],
)
def test_each_mistake_is_refused_in_a_long_run(name: str, sets: list[str]) -> None:
    assert name in failing(subject(*sets))


def test_the_disk_holds_the_shards_of_the_data_beside_the_checkpoints() -> None:
    looked_at = subject()
    shards = looked_at.estimate.staging.shard_bytes
    assert shards == pytest.approx(2 * 10e9, rel=0.01)  # sample-10BT, two bytes a token
    free = looked_at.estimate.disk_bytes
    assert failing(replace(looked_at, disk_free_bytes=free)) == []
    assert failing(replace(looked_at, disk_free_bytes=free - 2**30)) == ["disk"]
    less = subject("data.max_tokens=1000000")
    assert less.estimate.disk_bytes == free - shards + 2_000_000


@pytest.mark.parametrize(
    ("sets", "tokens", "words"),
    [
        ([], 10e9, "up to 10B tokens are staged"),
        (["data.subset=sample-100BT"], 100e9, "up to 100B tokens"),
        (["data.max_tokens=5000000"], 5e6, "up to 5M tokens are staged"),
        (["data.tokenizer=byte"], 45e9, "before step 1"),
        (["data.path=other/set"], None, "the whole of data.path"),
        (["data.source=fineweb_edu_local", "data.path=/d"], None, "preflight says how much"),
        (["data.source=stdlib", "data.tokenizer=byte"], 30e6, "of shards, roughly 6.0 s"),
    ],
)
def test_a_plan_says_what_is_staged_before_step_1_and_how_long(
    sets: list[str], tokens: float | None, words: str
) -> None:
    need = subject(*sets).estimate.staging
    assert need.tokens == (None if tokens is None else pytest.approx(tokens))
    assert words in need.sentence()
    assert need.is_long == (tokens is None or tokens >= 1e9)


def test_a_test_recipe_is_refused_in_a_long_run_and_fine_in_a_short_one() -> None:
    long_run = subject("schedule.steps=5000", recipe="tiny-cpu", profile="cpu")
    assert "recipe" in failing(long_run)
    assert failing(subject("schedule.steps=4999", recipe="tiny-cpu", profile="cpu")) == []


def test_checkpoints_that_do_not_fit_the_disk_are_refused_in_any_run() -> None:
    small = replace(subject("schedule.steps=10"), disk_free_bytes=GIB)
    assert failing(small) == ["disk"]


def test_a_small_disk_is_refused_in_units_that_can_be_read() -> None:
    tiny = subject("schedule.steps=10", recipe="tiny-cpu", profile="cpu")
    small = replace(tiny, disk_free_bytes=3 * 2**20)
    (refused,) = [one for one in check_guardrails(small) if one.status == "fail"]
    assert refused.message.endswith("3 MiB are free")
    assert "0.0" not in refused.message


def test_a_step_that_fills_the_card_is_refused_in_any_run() -> None:
    small = replace(subject("schedule.steps=10"), card_memory_mib=4096)
    assert failing(small) == ["memory"]
    (refused,) = [one for one in check_guardrails(small) if one.status == "fail"]
    assert "and 3,482 of the card's 4,096 MiB may be used" in refused.message
    assert refused.hint.startswith("Set `batch.micro_batch=")
    assert refused.hint.endswith(" then, or `--override memory=REASON`")


def test_what_is_unknown_does_not_pass() -> None:
    blind = replace(subject(), disk_free_bytes=None, card_memory_mib=None)
    unknown = [one.name for one in check_guardrails(blind) if one.status == "unknown"]
    assert unknown == ["guardrail.disk", "guardrail.memory"]


def test_a_refusal_names_the_reason_the_override_and_the_others() -> None:
    unwatched = subject("checkpoint.save_every=0", "evaluation.eval_every=0")
    with pytest.raises(RefusedError) as refused:
        require_guardrails(unwatched, {})
    assert refused.value.message == (
        "Refused by `guardrail.checkpoints`: save_every is 0: a crash loses the whole run "
        "(also `guardrail.validation`)"
    )
    assert "--override checkpoints=REASON" in refused.value.hint
    assert refused.value.exit_code == 3


def test_an_override_turns_a_failure_into_a_warning_with_its_reason() -> None:
    results = check_guardrails(subject("checkpoint.save_every=0"))
    passed = apply_overrides(results, {"checkpoints": "ten minute trial"})
    (warned,) = [one for one in passed if one.status == "warn"]
    assert warned.message.endswith("; overridden: ten minute trial")


def test_an_override_needs_a_known_name_and_a_reason() -> None:
    with pytest.raises(ConfigurationError) as unknown:
        parse_overrides(["checkpoint=x"])
    assert unknown.value.hint == "Did you mean `checkpoints`?"
    with pytest.raises(ConfigurationError, match="needs a reason"):
        parse_overrides(["checkpoints="])
    assert parse_overrides(["disk=a=b"]) == {"disk": "a=b"}


def test_every_guardrail_has_a_fix() -> None:
    assert all(rail.fix for rail in GUARDRAILS.values())
