"""The probe that a preflight runs on a card, on the same kernels under the interpreter."""

from typing import Any

import pytest

pytest.importorskip("triton", reason="the Triton kernels need the train extra")

INTERPRETED = "interpreted_checks"


@pytest.mark.slow
def test_the_kernels_pass_the_probe_and_a_planted_fault_does_not(interpreted: Any) -> None:
    # Half precision is left to the card, and to a case of test_decode_kernels.py.
    found = interpreted["float32"]
    assert found["is_equal"]
    assert 0 < found["error"] <= 1e-6
    assert (found["wrong_choices"], found["ties"], found["wrong_reads"]) == (0, 0, 0)
    planted = interpreted["planted"]
    assert not planted["is_equal"]
    assert planted["error"] > 1e-2
    assert planted["wrong_reads"] > 0
