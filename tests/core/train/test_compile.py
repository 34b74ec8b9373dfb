"""Compiled blocks: what cannot be compiled is an error, never run as written in silence."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from nsa_core.train.attempt import COMPILER_MODULES
from nsa_core.train.learner import compile_blocks


class BrokenBlock(nn.Module):
    """The tracer cannot follow it to its end."""

    def forward(self, x: Tensor) -> Tensor:
        """Leave the graph in the middle."""
        doubled = 2 * x
        torch._dynamo.graph_break()
        return doubled + 1


class ShapedBlock(nn.Module):
    """Every shape is a graph of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """Scale by the number of rows."""
        return x * x.shape[0]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=False):
        yield
    torch._dynamo.reset()


def test_a_block_that_would_run_in_pieces_is_refused():
    block = BrokenBlock()
    compile_blocks(SimpleNamespace(blocks=[block]))
    with pytest.raises(Exception, match="graph_break") as refusal:
        block(torch.ones(2))
    assert type(refusal.value).__module__.startswith(COMPILER_MODULES)


def test_a_block_of_too_many_shapes_is_refused():
    block = ShapedBlock()
    compile_blocks(SimpleNamespace(blocks=[]))
    block.compile(backend="eager", dynamic=False)
    with pytest.raises(Exception, match="limit") as refusal:
        for rows in range(2, 40):
            block(torch.ones(rows))
    assert type(refusal.value).__module__.startswith(COMPILER_MODULES)
