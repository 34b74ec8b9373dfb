"""The estimated memory of a step is that of every peak that a card has shown."""

import json
from pathlib import Path

import pytest

from nsa_core.config.counts import StepShape, estimate_memory
from nsa_core.config.recipe import resolve
from nsa_core.config.step_memory import estimate_step

RESULTS = Path(__file__).parents[3] / "bench" / "results"
MAIN = "m7c-125m"


def measured():
    """Model, shape and MiB of the whole steps in the results, one step a batch."""
    for name in ("model-h100", "model-h200", "checkpointing-h200", "model-settings-h200"):
        for row in json.loads((RESULTS / f"{name}.json").read_text())["rows"]:
            mode = row.get("activation_checkpointing", "none")
            setting = row.get("setting", "none")
            if "fp8" not in setting:  # the code that measured it is gone
                shape = {"activation_checkpointing": mode, "has_half_residual": setting != "none"}
                yield row["attention"], 50_304, row["tokens"], shape, row["peak_gib"] * 1024
    for row in json.loads((RESULTS / "trainer-h100.json").read_text())["rows"]:
        vocabulary = row["data"]["vocab_size"]
        yield row["attention"], vocabulary, row["tokens_per_step"], {}, row["peak_mib"]


@pytest.mark.parametrize(
    ("attention", "vocab_size", "tokens", "shape", "peak_mib"), list(measured())
)
def test_the_estimate_is_within_a_tenth_of_every_measured_peak(
    attention, vocab_size, tokens, shape, peak_mib
) -> None:
    config = resolve(MAIN).config
    model = config.model.model_copy(update={"attention": attention, "vocab_size": vocab_size})
    shape = StepShape(tokens, is_compiled=True, **shape)
    found = estimate_memory(model, config.optimizer, "bf16", shape)
    assert found.total == pytest.approx(peak_mib, rel=0.1)


def test_gradients_count_where_they_are_in_memory_beside_activations() -> None:
    config = resolve(MAIN).config

    def gradients(**shape):
        return estimate_memory(config.model, config.optimizer, "bf16", StepShape(**shape)).gradients

    whole = gradients(tokens=65_536, accumulation=2)
    assert whole == pytest.approx(458, abs=1)
    assert gradients(tokens=65_536) == 0  # they come to be while activations go away
    assert 0 < gradients(tokens=64) < whole


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_a_compiled_block_keeps_less_and_recomputation_keeps_one_layer(attention: str) -> None:
    config = resolve(MAIN, None, [f"model.attention={attention}"]).config

    def kept(**shape):
        return estimate_memory(
            config.model, config.optimizer, "bf16", StepShape(65_536, **shape)
        ).activations

    swiglu = 2 * config.model.mlp_width
    assert kept() - kept(is_compiled=True) == pytest.approx(
        65_536 * 12 * (swiglu + 2 * config.model.dim) / 2**20
    )
    layer = kept() / 12
    assert layer < kept(activation_checkpointing="full") < 3 * layer
    assert kept(activation_checkpointing="full") < kept(activation_checkpointing="selective")
    assert kept(is_compiled=True) - kept(is_compiled=True, has_half_residual=True) == pytest.approx(
        65_536 * 12 * 2 * config.model.dim / 2**20
    )


def test_a_half_residual_halves_the_stream_of_the_estimate() -> None:
    wide, half = (
        resolve(MAIN, None, [f"runtime.half_residual={value}"]).config for value in (False, True)
    )
    tokens = wide.batch.micro_batch * wide.batch.seq_len
    before, after = estimate_step(wide), estimate_step(half)
    assert before.logits - after.logits == pytest.approx(2 * 2 * tokens * wide.model.dim / 2**20)
    assert before.activations > after.activations


def test_fsdp_divides_the_state_among_the_ranks_and_gathers_tables_and_two_blocks() -> None:
    config = resolve("m7c-1b").config

    def needed(**shape):
        found = StepShape(16_384, **shape)
        return estimate_memory(config.model, config.optimizer, "bf16", found)

    alone, two = needed(), needed(num_ranks=2, sharding="fsdp")
    assert (two.weights, two.optimizer) == (alone.weights / 2, alone.optimizer / 2)
    assert two.activations == alone.activations
    table, blocks = 50_304 * 2048, (alone.weights * 2**18 - 50_304 * 2048) / 26
    assert two.gathered == pytest.approx((table + 2 * blocks) / 2**18, rel=1e-3)
    accumulating = needed(num_ranks=2, sharding="fsdp", accumulation=2)
    assert accumulating.gradients == alone.weights  # whole until the last micro-batch


def test_buckets_of_ddp_hold_the_gradients_also_of_one_micro_batch() -> None:
    config = resolve(MAIN).config
    shape = StepShape(65_536, num_ranks=2)
    found = estimate_memory(config.model, config.optimizer, "bf16", shape)
    assert found.gradients == found.weights
    assert found.gathered == 0
