"""Numbers as people read them."""

import math

import pytest

from nsa_ops.quantities import (
    format_bytes,
    format_count,
    format_duration,
    format_number,
    sentence_case,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.008, "8 ms"), (0, "0.0 s"), (9.9, "9.9 s"), (42, "42 s"), (59.9, "1 min"),
     (185, "3 min 5 s"), (3600, "1 h"), (7800, "2 h 10 min"), (100_800, "1 d 4 h"),
     (math.nan, "unknown")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (812, "812 B"), (1536, "1.5 KiB"), (5 * 2**30, "5 GiB"), (700 * 2**20, "700 MiB"),
     (3 * 2**41, "6 TiB")],
)  # fmt: skip
def test_bytes(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.25, "0.25"), (4032.18, "4032"), (0.0006, "6e-4"), (1.05e7, "1.05e7"),
     (-2.5, "-2.5"), (math.nan, "nan")],
)  # fmt: skip
def test_numbers(value: float, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(950, "950"), (12_500, "12.5k"), (1_048_576, "1.05M"), (3.2e9, "3.2B")]
)
def test_counts(value: float, text: str) -> None:
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("keep the last one", "Keep the last one"),
        ("a100's profile", "a100's profile"),
        ("runtime.num_gpus is 2", "runtime.num_gpus is 2"),
        ("h_bash@pod:22 does not answer", "h_bash@pod:22 does not answer"),
        ("ssh cannot start", "ssh cannot start"),
        ("unknown: what", "Unknown: what"),
        ("NSA_X is set", "NSA_X is set"),
        ("", ""),
    ],
)
def test_a_sentence_begins_with_a_capital_and_a_name_keeps_its_case(text: str, shown: str) -> None:
    assert sentence_case(text) == shown
