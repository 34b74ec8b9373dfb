"""Every Triton kernel under the interpreter, against an oracle in float64."""

import pytest

pytest.importorskip("triton", reason="the Triton kernels need the train extra")


INTERPRETED = "interpreted"
CASES = (
    "compressed-6", "compressed-5", "compressed-1", "compressed-nothing",
    "pool",
    "select-6", "select-16", "ties", "sliding-6", "sliding-5", "sliding-1",
    "dense-6", "dense-5", "items-6", "items-5", "items-16",
    "attend-dense", "attend-items", "attend-ordered", "compile",
)  # fmt: skip
# float32 against float64: rounding alone gives up to 5e-7 on these sizes.
TOLERANCE = 3e-6


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_kernels_agree_with_the_oracle(interpreted: dict[str, dict[str, float]], case: str) -> None:
    for quantity, error in interpreted[case].items():
        assert error <= TOLERANCE, f"{case}: {quantity} is off by {error}"


@pytest.mark.slow
def test_no_case_is_left_out(interpreted: dict[str, dict[str, float]]) -> None:
    assert set(interpreted) == set(CASES)
