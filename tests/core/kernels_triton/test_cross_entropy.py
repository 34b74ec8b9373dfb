"""The cross-entropy kernel: right under the interpreter, and compiled for the cards we name."""

import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels need the train extra")

from nsa_core.kernels.triton.cross_entropy import cross_entropy_
from tests.core.kernels_triton.compiling import compile_launch, recording

INTERPRETED = "interpreted_loss"
# A score of 130 in base 2 carries a rounding error of 8e-6; gradients are shares of 1.
TOLERANCE = 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("case", ["kernel-64", "kernel-50", "kernel-9000", "bfloat16", "whole"])
def test_loss_and_gradient_are_those_of_plain_cross_entropy(interpreted, case):
    for quantity, error in interpreted[case].items():
        assert error <= TOLERANCE, f"{case}: {quantity} is off by {error}"


@pytest.mark.parametrize("arch", [80, 89, 90])
def test_the_main_vocabulary_compiles_without_spilling(arch):
    logits = torch.zeros(2, 50304, dtype=torch.bfloat16)
    target = torch.zeros(2, dtype=torch.int64)
    with recording(arch) as launches:
        cross_entropy_(logits, target, with_gradient=True)
        cross_entropy_(logits, target, with_gradient=False)
    assert len(launches) == 2
    for launch in launches:
        assert compile_launch(launch, arch).stack_bytes == 0
