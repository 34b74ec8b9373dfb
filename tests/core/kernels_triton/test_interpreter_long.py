"""The kernels beyond the first mask word, score chunk, cell and segment, against the oracle."""

import pytest

pytest.importorskip("triton", reason="the Triton kernels need the train extra")

INTERPRETED = "interpreted_long"
CASES = ("choice", "choice-few", "mask", "mask-pairs", "items", "items-ordered", "items-partial")
# float32 against float64, as in test_interpreter.py; ids are right or wrong.
TOLERANCE = 3e-6


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_long_documents_agree_with_the_oracle(
    interpreted: dict[str, dict[str, float]], case: str
) -> None:
    for quantity, error in interpreted[case].items():
        assert error <= TOLERANCE, f"{case}: {quantity} is off by {error}"
