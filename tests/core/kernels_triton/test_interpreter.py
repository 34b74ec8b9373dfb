"""Every Triton kernel under the interpreter, against an oracle in float64."""

import pytest

pytest.importorskip("triton", reason="the Triton kernels need the train extra")


INTERPRETED = "interpreted"
CASES = (
    "compressed-6", "compressed-5", "compressed-1", "compressed-nothing",
    "select-6", "select-16", "ties", "one-tile-6", "one-tile-5", "one-tile-1", "one-tile-16",
    "one-tile-broken-value", "half-one-tile-broken-value",
    "sliding-6", "sliding-5", "sliding-1",
    "dense-6", "dense-5", "items-6", "items-5", "items-16",
    "attend-dense", "attend-items", "attend-apart", "attend-ordered",
    "compile", "recomputed", "half-dense", "half-ordered",
    *(
        f"{blocks}-{case}"
        for blocks in ("quarters", "strides")
        for case in ("compressed", "select", "one-tile", "dense", "ordered")
    ),
)  # fmt: skip
# float32 against float64: rounding alone gives up to 5e-7 on these sizes.
TOLERANCE = 3e-6
# float16 rounds outputs, probabilities and ds, each by half an ulp: 2.4e-4.
HALF_TOLERANCE = 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_kernels_agree_with_the_oracle(interpreted: dict[str, dict[str, float]], case: str) -> None:
    limit = HALF_TOLERANCE if case.startswith("half") else TOLERANCE
    for quantity, error in interpreted[case].items():
        assert error <= limit, f"{case}: {quantity} is off by {error}"


@pytest.mark.slow
def test_no_case_is_left_out(interpreted: dict[str, dict[str, float]]) -> None:
    assert set(interpreted) == set(CASES)
