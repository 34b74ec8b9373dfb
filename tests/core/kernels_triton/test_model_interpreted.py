"""A whole model on the Triton kernels, under the interpreter: causal, and every weight trained."""

import pytest

pytest.importorskip("triton", reason="the Triton kernels need the train extra")

from tests.core.kernels_triton.interpreter_process import run_interpreted

# float32 on both sides, sums in another order: 2e-6 is four times what was seen.
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def found():
    """What one interpreter process found."""
    return run_interpreted("interpreted_model")


@pytest.mark.slow
def test_changing_the_future_or_another_document_changes_no_bit(found):
    assert found["num_cases"] >= 20
    assert found["moved"] == []


@pytest.mark.slow
def test_the_gradient_of_an_output_by_later_inputs_is_exactly_zero(found):
    assert found["reached"] == []


@pytest.mark.slow
def test_every_parameter_has_the_gradient_of_the_reference_and_none_is_zero(found):
    assert len(found["gradient_errors"]) > 10
    assert max(found["gradient_errors"].values()) <= TOLERANCE


@pytest.mark.slow
def test_a_step_records_the_gates_and_the_choice_that_the_reference_has(found):
    ours, expected = found["statistics"]
    assert expected["selected_blocks"] > 1
    assert ours == pytest.approx(expected, rel=1e-5)
