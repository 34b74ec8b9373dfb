"""The decode bench: what it counts and refuses, on a machine without a card."""

import argparse

import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels need the train extra")

from nsa_core.bench import decode_speed as decode
from nsa_core.bench.cases import GEOMETRY, SHAPES
from nsa_core.bench.measure import describe_machine
from tests.oracle import num_reads


@pytest.mark.parametrize("length", [1, 31, 32, 64, 1000, 1024, 65_536, 65_537])
def test_the_floor_is_every_key_and_value_that_the_last_token_reads(length: int) -> None:
    keys = num_reads(GEOMETRY, length - 1)
    assert decode.floor_bytes(SHAPES["A"], length, 3, 2) == 3 * keys * 2 * (64 + 64) * 2


def test_the_floor_at_65536_and_16_sequences_is_44_mib() -> None:
    assert decode.floor_bytes(SHAPES["A"], 65_536, 16, 2) == 16 * 5631 * 512


def flags(*words):
    parser = argparse.ArgumentParser()
    decode.add_flags(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize("flag", ["--length", "--batch", "--runs"])
def test_sizes_below_one_are_refused_before_anything_is_timed(flag: str) -> None:
    with pytest.raises(ValueError, match=f"{flag} must be at least 1, got 0"):
        decode.measure(flags(flag, "0"), describe_machine())


def test_without_flags_it_times_what_the_bars_are_about(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(decode, "measure_rows", lambda request: iter(asked.append(request) or ()))
    assert list(decode.measure(flags(), describe_machine())) == []
    (request,) = asked
    assert (request.shapes, request.lengths) == (("A",), (8192, 32768, 65536))
    assert (request.batches, request.dtype) == ((1, 16), torch.bfloat16)


def test_a_row_stands_under_its_heads() -> None:
    row = decode.DecodeRow(
        shape="A", T=65536, batch=16, nsa_ms=0.034, dense_cudnn_ms=0.2, dense_flash_ms=0.21,
        ratio_to_cudnn=0.17, ratio_to_fastest=0.17, floor_mib=44.0, floor_ms=0.0154, spread=0.003,
    )  # fmt: skip
    line = decode.TABLE.line(row)
    assert len(line) == len(decode.TABLE.header)
    cells = [
        "A",
        "65536",
        "16",
        "34.0",
        "200.0",
        "210.0",
        "0.17",
        "0.17",
        "15.4",
        "44.0",
        "0.3",
        "%",
    ]
    assert line.split() == cells
