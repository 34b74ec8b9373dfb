"""The whole-step bench on a CPU: it trains, counts what it says, and refuses what means nothing."""

import argparse
from dataclasses import replace

import pytest
import torch

from nsa_core.bench import step_speed
from nsa_core.bench.__main__ import main
from nsa_core.bench.step_speed import (
    TABLE,
    ModelRequest,
    NoGoodStepError,
    measure_model,
    random_batch,
    read_request,
    run_config,
    run_steps,
)
from nsa_core.config.counts import count_flops
from nsa_core.config.model import ModelConfig, NSAConfig
from nsa_core.config.training import RuntimeConfig
from nsa_core.train.learner import choose_device, make_learner

TINY = ModelConfig(
    vocab_size=300,
    dim=32,
    num_layers=2,
    num_heads=4,
    num_kv_groups=2,
    head_dim_k=16,
    head_dim_v=16,
    mlp_width=64,
    nsa=NSAConfig(compress_block=8, compress_stride=4, select_block=8, num_selected=3, window=16),
)
REQUEST = ModelRequest(
    model=TINY, lengths=(32, 64), tokens=128, steps=2, runs=3,
    runtime=RuntimeConfig(device="cpu", precision="fp32"),
)  # fmt: skip


@pytest.fixture(scope="module")
def rows():
    return list(measure_model(REQUEST))


def test_nsa_and_dense_stand_side_by_side_at_every_length(rows) -> None:
    assert [(row.attention, row.T) for row in rows] == [
        ("nsa", 32), ("dense", 32), ("nsa", 64), ("dense", 64),
    ]  # fmt: skip


def test_the_timed_steps_train(rows) -> None:
    for row in rows:
        assert row.last_loss < row.first_loss - 0.1


def test_rates_and_flops_belong_to_the_attention_that_was_timed(rows) -> None:
    for row in rows:
        config = TINY.model_copy(update={"attention": row.attention})
        assert row.train_flops_per_token == count_flops(config, row.T).train
        assert row.step_ms == pytest.approx(1e3 * row.tokens / row.tokens_per_s)
        assert row.tflops == pytest.approx(row.tokens_per_s * row.train_flops_per_token / 1e12)
        assert row.mfu is None  # a CPU has no data sheet here


def test_a_row_is_one_line_under_the_header(rows) -> None:
    line = TABLE.line(rows[0])
    assert "\n" not in line
    assert line.split()[:2] == ["nsa", "32"]
    assert TABLE.header.split()[:3] == ["model", "T", "tokens/s"]


def test_a_step_that_holds_no_whole_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="128 tokens is no whole number of rows of 48"):
        replace(REQUEST, lengths=(48,))


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--steps", "-3"), ("--steps", "0"), ("--runs", "0"), ("--tokens", "0"), ("--length", "0"),
        ("--length", "-1"),
    ],
)  # fmt: skip
def test_sizes_that_would_time_nothing_are_one_line_before_anything_is_timed(
    flag: str, value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_speed, "make_learner", None)
    assert main(["model", flag, value]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"error: {flag} must be at least 1, got {value}\n")


def parsed(*words):
    parser = argparse.ArgumentParser()
    step_speed.add_flags(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("flag", "read"),
    [
        ("runtime.compile=false", lambda request: request.runtime.compile is False),
        ("runtime.precision=fp32", lambda request: request.runtime.precision == "fp32"),
        ("runtime.half_residual=true", lambda request: request.runtime.half_residual),
        ("runtime.backend=sdpa", lambda request: request.runtime.backend == "sdpa"),
        (
            "runtime.activation_checkpointing=full",
            lambda request: request.runtime.activation_checkpointing == "full",
        ),
        ("model.num_layers=3", lambda request: request.model.num_layers == 3),
    ],
)
def test_a_setting_of_model_or_runtime_is_followed(flag: str, read) -> None:
    assert not read(read_request(parsed(), is_card=True))
    asked = read_request(parsed("--set", flag), is_card=True)
    assert read(asked)
    assert read_of_run(asked) == (asked.runtime, asked.model.num_layers)


def read_of_run(request):
    config = run_config(request, "nsa", 2048)
    return config.runtime, config.model.num_layers


def test_a_card_compiles_in_half_precision_and_a_cpu_does_not() -> None:
    card, cpu = (read_request(parsed(), is_card=is_card).runtime for is_card in (True, False))
    assert (card.compile, card.precision) == (True, "bf16")
    assert (cpu.compile, cpu.precision) == (False, "fp32")


@pytest.mark.parametrize(
    "key",
    [
        "data.source=stdlib", "batch.seq_len=4096", "optimizer.kind=muon", "seed=3",
        "runtime.allocator=x", "runtime.num_gpus=2", "model.attention=dense",
    ],
)  # fmt: skip
def test_a_setting_that_the_bench_cannot_follow_is_refused(
    key: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_speed, "make_learner", None)
    assert main(["model", "--set", key]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: --set {key.partition('=')[0]}: this bench times")


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a card")
def test_what_the_trainer_refuses_is_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--length", "32", "--tokens", "32", "--set", "runtime.backend=triton"]
    assert main(["model", *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    last = err.splitlines()[-1]  # the only line that an operator is shown of a bench on a pod
    assert last.startswith("error: backend triton cannot run the compressed branch")
    assert last.endswith("; set runtime.backend=auto")


def test_a_skipped_step_is_no_timing() -> None:
    config = run_config(REQUEST, "nsa", 32)
    learner = make_learner(config, choose_device(config))
    learner.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(NoGoodStepError, match="skipped"):
        run_steps(learner, random_batch(config), 1)
