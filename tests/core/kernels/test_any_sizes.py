"""Any valid sizes, documents and groups: the block-sparse backend is the reference."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_core.kernels.gathered_backend import GatheredBackend
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.packing import Packing
from nsa_core.kernels.reference import ReferenceBackend
from tests.core.kernels.cases import gradients, make_inputs, run


@st.composite
def geometries(draw):
    stride = draw(st.integers(1, 4))
    strides = draw(st.integers(1, 3))
    select = stride * draw(st.integers(strides, 5))
    return BlockGeometry(
        compress_block=stride * strides,
        compress_stride=stride,
        select_block=select,
        num_selected=draw(st.integers(3, 5)),
        window=draw(st.integers(1, 20)),
    )


@given(
    geometry=geometries(),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    group_size=st.integers(1, 16),
    groups=st.integers(1, 3),
    copies=st.integers(1, 3),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=120, deadline=None, derandomize=True)
def test_outputs_choices_and_gradients_equal_the_reference(
    geometry, lengths, group_size, groups, copies, seed
):
    packing = (
        Packing.uniform(copies, lengths[0]) if len(lengths) == 1 else Packing.from_lengths(lengths)
    )
    heads = group_size * groups
    inputs = make_inputs(packing, geometry, heads=heads, groups=groups, seed=seed)
    expected, found = (
        run(backend, inputs, geometry, packing)
        for backend in (ReferenceBackend(), GatheredBackend())
    )
    assert torch.equal(found.ids, expected.ids)
    for out, truth in zip(found.branches(), expected.branches(), strict=True):
        torch.testing.assert_close(out, truth, rtol=0, atol=1e-11)
    for grad, truth in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(grad, truth, rtol=0, atol=1e-10)
