"""No tensor with T * T elements, and memory linear in T (bar: at most 1.2 x)."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nsa_core.kernels import gathered_backend
from nsa_core.kernels.gathered_backend import GatheredBackend
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.packing import Packing
from nsa_core.kernels.reference import ReferenceBackend
from tests.core.kernels.cases import gradients, make_inputs, run

SIZES = BlockGeometry(16, 8, 16, 4, 32)


class LargestTensor(TorchDispatchMode):
    """Remembers the largest number of elements that any operation returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                stored = leaf.untyped_storage().nbytes() // leaf.element_size()
                self.elements = max(self.elements, min(stored, leaf.numel()))
        return result


def largest_tensor(backend, length):
    packing = Packing.uniform(1, length)
    inputs = make_inputs(packing, SIZES, dtype=torch.float32, heads=2, groups=1)
    with LargestTensor() as largest:
        gradients(run(backend, inputs, SIZES, packing), inputs)
    return largest.elements


@pytest.mark.parametrize("factor", [0, 8, 10**6], ids=["gathered", "by length", "masked"])
def test_no_tensor_has_t_times_t_elements(factor, monkeypatch):
    monkeypatch.setattr(gathered_backend, "MASKED_LENGTH_FACTOR", factor)
    length = 1024
    assert largest_tensor(GatheredBackend(), length) < length * length


def test_the_measurement_sees_the_reference_build_one():
    assert largest_tensor(ReferenceBackend(), 256) >= 256 * 256


def test_the_largest_tensor_grows_at_most_linearly():
    short, long = (largest_tensor(GatheredBackend(), length) for length in (1024, 4096))
    assert long <= 1.2 * 4 * short
