"""The host's own arithmetic is Triton's."""

import pytest

pytest.importorskip("triton", reason="the Triton kernels need the train extra")

import triton

from nsa_core.kernels.triton.sizes import cdiv, next_power_of_2


def test_counts_are_rounded_as_triton_rounds_them() -> None:
    for count in range(1, 300):
        assert next_power_of_2(count) == triton.next_power_of_2(count)
        for size in (1, 2, 3, 64, 100):
            assert cdiv(count, size) == triton.cdiv(count, size)
    assert cdiv(0, 64) == 0
