"""The bench of several ranks: what it composes of their times, and once two real ones."""

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from nsa_core.bench import scale, scale_processes, scale_rank
from nsa_core.bench.__main__ import main
from nsa_core.bench.scale import (
    TABLE,
    ScaleRequest,
    ScaleRow,
    compose_row,
    find_failure,
    measure_scale,
    rank_config,
    read_request,
    with_efficiency,
)
from nsa_core.bench.scale_rank import OUT_OF_MEMORY, RankRequest, RankTimes
from nsa_core.config.base import ConfigError
from nsa_core.config.run import RunConfig
from nsa_core.rundir.atomic import write_text

TINY = [
    "model.dim=32", "model.num_layers=2", "model.num_heads=4", "model.num_kv_groups=2",
    "model.head_dim_k=16", "model.head_dim_v=16", "model.mlp_width=64", "model.vocab_size=300",
    "runtime.threads=1",
]  # fmt: skip


def options(**changes: object) -> argparse.Namespace:
    values = {
        "recipe": "m7c-125m", "ranks": None, "sharding": None, "length": [64], "tokens": 256,
        "accumulation": 2, "runs": 2, "steps": 4, "set": list(TINY),
    }  # fmt: skip
    return argparse.Namespace(**(values | changes))


REQUEST = read_request(options(ranks=4), num_cards=4)
ONE = RankTimes(seconds=(1.0, 2.0), losses=(5.0, 4.0), peak_gib=10.0, num_parameters=7)
SLOW = RankTimes(seconds=(1.5, 1.0), losses=(5.0, 4.0), peak_gib=12.0, num_parameters=7)


def row_of(*times: RankTimes | None, problem: str = "", sharding: str = "ddp") -> ScaleRow:
    config = rank_config(REQUEST, 64, len(times), sharding)  # type: ignore[arg-type]
    return compose_row(REQUEST, config, times, problem)


def test_every_rank_has_the_tokens_of_one_card_and_a_step_those_of_all() -> None:
    for ranks in (1, 4):
        config = rank_config(REQUEST, 64, ranks, "ddp")
        assert (config.num_ranks, config.runtime.num_gpus) == (ranks, ranks)
        assert config.batch.tokens_per_step == ranks * 256
        assert config.batch.accumulation // config.num_ranks == 2
    cpu = rank_config(read_request(options(), num_cards=0), 64, 2, "ddp")
    assert (cpu.runtime.device, cpu.runtime.cpu_ranks, cpu.num_ranks) == ("cpu", 2, 2)


def test_a_step_is_as_fast_as_its_slowest_rank_and_as_large_as_its_fullest() -> None:
    row = row_of(ONE, SLOW)
    # slowest of each repetition: 1.5 s and 2 s for 4 steps of 2 x 256 tokens
    assert row.tokens_per_s == pytest.approx((2048 / 1.5 + 2048 / 2.0) / 2)
    assert row.step_ms == pytest.approx(1e3 * 512 / row.tokens_per_s)
    assert row.spread == pytest.approx((2048 / 1.5 - 2048 / 2.0) / row.tokens_per_s)
    assert (row.peak_gib, row.sharding, row.outcome) == (12.0, "ddp", "ok")
    assert row_of(ONE).sharding == "none"


def test_efficiency_is_held_against_one_rank_or_ddp_where_one_does_not_fit() -> None:
    alone, two = row_of(ONE), row_of(ONE, SLOW)
    assert alone.tokens_per_s and two.tokens_per_s
    found = with_efficiency(two, [alone])
    assert found.baseline == "1 rank"
    assert found.efficiency == pytest.approx(two.tokens_per_s / 2 / alone.tokens_per_s)
    full = row_of(RankTimes(problem=OUT_OF_MEMORY), problem="exit code 1: x")
    assert full.outcome == OUT_OF_MEMORY
    assert with_efficiency(two, [full]).efficiency is None
    second = with_efficiency(two, [full, two])
    assert (second.efficiency, second.baseline) == (pytest.approx(1.0), "2 ranks, ddp")


@pytest.mark.parametrize(
    ("times", "problem", "outcome"),
    [
        ((ONE, None), "exit code 1: RuntimeError: x", "exit code 1: RuntimeError: x"),
        ((ONE, None), "", "no answer from rank 1"),
        ((ONE, RankTimes(problem="NoGoodStepError: x")), "exit code 1: y", "rank 1: NoGoodStep"),
        ((RankTimes(problem="lost"), RankTimes(problem=OUT_OF_MEMORY)), "exit", OUT_OF_MEMORY),
        ((ONE, ONE), "not finished within 900 s", "not finished within 900 s"),
    ],
)
def test_ranks_that_did_not_finish_are_a_row_that_says_why(
    times: tuple[RankTimes | None, ...], problem: str, outcome: str
) -> None:
    row = row_of(*times, problem=problem)
    assert row.outcome.startswith(outcome)
    assert row.tokens_per_s is None
    assert (find_failure([row]) is None) == (outcome == OUT_OF_MEMORY)
    assert "n/a" in TABLE.line(row)


def test_a_state_that_is_not_kept_as_asked_is_no_measurement() -> None:
    row = row_of(ONE, SLOW, sharding="fsdp")
    assert row.outcome == "the trainer does not keep its state as fsdp"
    assert find_failure([row])
    part = ONE.model_copy(update={"is_sharded": True})
    assert row_of(part, part, sharding="fsdp").outcome == "ok"
    assert row_of(part, part).outcome != "ok"


def test_ranks_that_did_not_learn_fail_the_bench() -> None:
    flat = ONE.model_copy(update={"losses": (5.0, 5.0)})
    assert "did not learn" in str(find_failure([row_of(flat)]))
    assert find_failure([row_of(ONE), row_of(ONE, SLOW)]) is None


@pytest.mark.parametrize(
    ("changes", "num_cards", "error", "message"),
    [
        ({"ranks": 8}, 2, ValueError, "needs as many cards, and torch sees 2"),
        ({}, 1, ValueError, "one alone has nothing to be compared with"),
        ({"ranks": 1}, 0, ValueError, "--ranks must be at least 2"),
        ({"ranks": 10**18}, 0, ValueError, "--ranks must be at most 256"),
        ({"length": [60]}, 0, ValueError, "not 2 equal micro-batches of whole rows of 60"),
        ({"set": ["runtime.num_gpus=2"]}, 0, ConfigError, "has --ranks"),
        ({"set": ["schedule.steps=2"]}, 0, ConfigError, "follows no such setting"),
    ],
)
def test_what_cannot_be_measured_is_refused_first(
    changes: dict[str, object], num_cards: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        read_request(options(**changes), num_cards=num_cards)


def test_the_rows_come_length_by_length_with_one_rank_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measured(request: ScaleRequest, length: int, ranks: int, sharding: str) -> ScaleRow:
        return ScaleRow("m", length, ranks, sharding, 256, tokens_per_s=ranks * 90.0 + 10)

    monkeypatch.setattr(scale, "measure_row", measured)
    request = read_request(options(length=[32, 64], sharding=["ddp", "fsdp"]), num_cards=2)
    rows = list(measure_scale(request))
    assert [(row.T, row.ranks, row.sharding) for row in rows] == [
        (length, *one) for length in (32, 64) for one in ((1, "ddp"), (2, "ddp"), (2, "fsdp"))
    ]
    assert [row.efficiency for row in rows[:3]] == [None, 0.95, 0.95]


def test_processes_that_hang_are_ended_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "pid"
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\necho $$ > {started}\nexec sleep 300\n")
    fake.chmod(0o755)
    monkeypatch.setattr(scale_processes.sys, "executable", str(fake))
    monkeypatch.setattr(scale_processes, "DEADLINE_S", 1.0)
    asked = RankRequest(config=rank_config(REQUEST, 64, 1, "ddp"), warmup_steps=1, steps=1, runs=1)
    assert scale_processes.run_ranks(tmp_path, asked) == "not finished within 1 s"
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_one_and_two_real_ranks_train_and_are_compared(tmp_path: Path) -> None:
    result = tmp_path / "scale.json"
    words = [word for flag in TINY for word in ("--set", flag)]
    code = main(
        ["scale", "--ranks", "2", "--length", "32", "--tokens", "64", "--accumulation", "2",
         "--runs", "2", "--steps", "2", *words, "--json", str(result)]
    )  # fmt: skip
    assert code == 0
    one, two = json.loads(result.read_text())["rows"]
    assert one.keys() == asdict(row_of(ONE)).keys()
    assert (one["ranks"], two["ranks"], two["baseline"]) == (1, 2, "1 rank")
    assert two["efficiency"] == pytest.approx(two["tokens_per_s"] / 2 / one["tokens_per_s"])
    assert one["outcome"] == two["outcome"] == "ok"
    # rank 0 sees the same batches alone and among two; another's are added to them
    assert one["first_loss"] == pytest.approx(two["first_loss"], rel=0.1)
    assert one["first_loss"] != two["first_loss"]


def test_an_error_without_words_is_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(scale_rank, "choose_device", fail)
    request = scale_rank.RankRequest(config=RunConfig(), warmup_steps=1, steps=1, runs=1)
    write_text(tmp_path / scale_rank.REQUEST, request.model_dump_json())
    assert scale_rank.measure_rank(tmp_path).problem == "RuntimeError: "
