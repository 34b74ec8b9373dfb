"""What the Python interface of the model cannot mean is refused with one clear error."""

import math

import pytest
import torch
from pydantic import ValidationError

from nsa_core.config.model import MAX_POSITIONS, GateConfig, ModelConfig
from nsa_core.config.run import RunConfig
from nsa_core.evaluate.sampling import stream
from nsa_core.kernels.packing import Packing
from nsa_core.model.attention import make_context
from nsa_core.model.cache import DecodeCache
from nsa_core.model.decode import extend, prefill
from nsa_core.model.decode_step import DecodeLoop
from nsa_core.model.loss import loss_sum
from tests.core.model.cases import small_config, small_model, tokens


def no_tokens(*shape) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize("shape", [(2, 0), (0, 5), (0, 0)])
def test_a_batch_without_tokens_is_refused_everywhere(
    attention: str, shape: tuple[int, int]
) -> None:
    model, row = small_model(small_config(attention=attention)), no_tokens(*shape)
    cache = DecodeCache.allocate(model.config, batch=2, capacity=9, dtype=torch.float64)
    for call in (
        lambda: model(row),
        lambda: model.hidden(row),
        lambda: model.loss(row, row),
        lambda: extend(model, cache, row),
        lambda: prefill(model, cache, row),
    ):
        with pytest.raises(ValueError, match=r"no tokens in a batch of shape \[\d, \d\]"):
            call()
    assert cache.length == 0


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32, torch.bool])
def test_ids_of_another_dtype_are_refused(dtype: torch.dtype) -> None:
    model, row = small_model(), tokens(1, 5).to(dtype)
    cache = DecodeCache.allocate(model.config, batch=1, capacity=9, dtype=torch.float64)
    for call in (lambda: model(row), lambda: extend(model, cache, row)):
        with pytest.raises(ValueError, match=f"int64 or int32, got .* {dtype}"):
            call()
    with pytest.raises(ValueError, match=f"int64 or int32, got .* {dtype}"):
        DecodeLoop(model, cache).step(row[0, :1])


def test_ids_of_another_shape_are_refused() -> None:
    model = small_model()
    with pytest.raises(ValueError, match=r"\[batch, tokens\].*got \[5\]"):
        model(tokens(1, 5)[0])
    with pytest.raises(ValueError, match=r"targets of shape \[1, 4\] do not fit .* \[1, 5\]"):
        model.loss(tokens(1, 5), tokens(1, 4))


def test_the_loss_refuses_what_does_not_fit() -> None:
    hidden, weight, target = torch.zeros(4, 6), torch.zeros(5, 6), no_tokens(4)
    for inputs, words in (
        ((hidden[:0], weight, target[:0]), "at least one token"),
        ((hidden, weight[:, :5], target), r"got \[\[4, 6\], \[5, 5\]"),
        ((hidden, weight, target[:3]), r"\[3\]"),
        ((hidden, weight, target.to(torch.int8)), "int64 targets"),
        ((hidden.to(torch.int8), weight, target), "floating-point"),
    ):
        with pytest.raises(ValueError, match=words):
            loss_sum(*inputs)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"capacity": 0}, "capacity must be at least 1"),
        ({"capacity": -4}, "capacity .*got -4"),
        ({"chunk": 0}, "chunk must be at least 1, got 0"),
        ({"chunk": -1}, "chunk .*got -1"),
        ({"capacity": MAX_POSITIONS + 1}, "capacity .*at most 16,777,216, got 16,777,217"),
        ({"dtype": torch.int8}, "floating-point numbers, got torch.int8"),
    ],
)
def test_a_cache_that_could_hold_nothing_is_refused(changes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DecodeCache.allocate(
            small_config(), **{"batch": 1, "capacity": 9, "device": "meta"} | changes
        )


def test_another_number_of_sequences_than_the_cache_has_is_refused() -> None:
    model = small_model()
    cache = DecodeCache.allocate(model.config, batch=3, capacity=9, dtype=torch.float64)
    with pytest.raises(ValueError, match="holds 3 sequences, and there are tokens of 2"):
        extend(model, cache, tokens(2, 4))
    with pytest.raises(ValueError, match=r"a step takes 3 ids .*got \[1\]"):
        DecodeLoop(model, cache).step(no_tokens(1))


def test_positions_that_float32_cannot_tell_apart_are_refused() -> None:
    model, packing = small_model(), Packing.from_lengths([4])
    longer = Packing(**{**vars(packing), "max_seqlen": MAX_POSITIONS + 1})
    assert torch.tensor(float(MAX_POSITIONS)) == torch.tensor(float(MAX_POSITIONS + 1))
    with pytest.raises(ValueError, match=r"tokens of a document .*at most 16,777,216"):
        make_context(model.geometry, longer, model.rotary)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"max_new_tokens": -3}, "max_new_tokens .*got -3"),
        ({"prefill_chunk": 0}, "prefill_chunk must be at least 1"),
        ({"num_ids": 0}, "num_ids must be at least 1 and at most 31, got 0"),
        ({"num_ids": -2}, "num_ids"),
        ({"num_ids": 32}, "num_ids .*got 32"),
    ],
)
def test_counts_of_a_text_are_refused_before_the_first_id_is_asked_for(
    changes: dict[str, int], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        stream(small_model(), [1, 2], **{"max_new_tokens": 3} | changes)


def test_generate_refuses_what_stream_does() -> None:
    with pytest.raises(ValueError, match="max_new_tokens"):
        list(stream(small_model(), [1, 2], max_new_tokens=0))


@pytest.mark.parametrize("norm_eps", [math.inf, math.nan, 0.0])
def test_a_norm_that_is_no_norm_is_refused(norm_eps) -> None:
    with pytest.raises(ValidationError, match="norm_eps"):
        ModelConfig(norm_eps=norm_eps)


@pytest.mark.parametrize("temperature", [math.inf, math.nan, 1e-40, 1e7, 0.0, -1.0])
def test_a_temperature_of_the_gates_that_means_nothing_is_refused(temperature) -> None:
    with pytest.raises(ValidationError, match="temperature"):
        GateConfig(kind="softmax", temperature=temperature)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_a_temperature_beside_a_gate_that_has_none_is_refused(kind: str) -> None:
    with pytest.raises(ValidationError, match=f"temperature 2 does nothing while kind is {kind}"):
        GateConfig(kind=kind, temperature=2.0)
    assert GateConfig(kind=kind, temperature=1.0).temperature == 1


def test_a_record_of_a_run_with_such_a_temperature_still_loads() -> None:
    record = RunConfig().model_dump_json().replace('"temperature":1.0', '"temperature":2.0')
    assert RunConfig.model_validate_json(record).model.gate.temperature == 2
