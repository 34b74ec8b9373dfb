"""A launch finds the machine code that Triton would take, and only that."""

import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels need the train extra")

import triton
import triton.language as tl
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from nsa_core.kernels.triton import launcher
from nsa_core.kernels.triton.descriptors import TileDescriptor


@triton.jit(do_not_specialize=["count"])
def scale_kernel(X, Y, count, factor, WIDTH: tl.constexpr):
    at = tl.arange(0, WIDTH)
    tl.store(Y + at, tl.load(X + at, mask=at < count) * factor, mask=at < count)


@triton.jit
def careless_kernel(X, count, WIDTH: tl.constexpr):
    tl.store(X + tl.arange(0, WIDTH), count)


@triton.jit
def copy_kernel(x_desc, X, WIDTH: tl.constexpr):
    pass


class Compiled(CompiledKernel):
    """Stands for machine code; writes down with what it is launched."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *args: self.launches.append((grid, args))


@pytest.fixture
def compilations(monkeypatch):
    """What Triton itself was asked to launch, and so to compile."""
    made = []

    def run(kernel, *args, grid, warmup, **options):
        made.append(Compiled())
        return made[-1]

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(launcher, "_COMPILED", {})
    monkeypatch.setattr(launcher, "_ARGUMENTS", {})
    return made


def launch(x, y, count=16, factor=2.0, width=16, **options):
    launcher.run(scale_kernel, (3,), x, y, count, factor, width, **options)


def test_the_second_launch_goes_straight_to_the_compiled_kernel(compilations):
    x, y = torch.zeros(16), torch.zeros(16)
    launch(x, y)
    launch(y, x, count=7, factor=0.5)
    assert len(compilations) == 1
    assert compilations[0].launches == [((3, 1, 1), (y, x, 7, 0.5, 16))]


def test_whatever_decides_machine_code_is_compiled_by_itself(compilations):
    x, y, long = torch.zeros(16), torch.zeros(16), torch.zeros(20)
    launch(x, y)
    launch(long[1:17], y)  # no longer a multiple of 16 bytes
    launch(x, long[1:17])
    launch(x.half(), y)
    launch(x, y, width=32)
    launch(x, y, num_warps=8)
    assert len(compilations) == 6
    assert not any(compiled.launches for compiled in compilations)


def test_a_descriptor_is_made_for_triton_once_and_then_passed_as_it_is(compilations):
    pytest.importorskip("triton.experimental.gluon")
    x, other = torch.zeros(128, 64), torch.zeros(256, 64)
    box = (64, 64)
    launcher.run(copy_kernel, (1,), TileDescriptor(x, (128, 64), box), x, 64)
    again = TileDescriptor(other, (256, 64), box)
    launcher.run(copy_kernel, (2,), again, other, 64)
    launcher.run(copy_kernel, (1,), TileDescriptor(x.half(), (128, 64), box), x, 64)
    assert len(compilations) == 2
    assert compilations[0].launches == [((2, 1, 1), (again, other, 64))]


def test_triton_gets_the_matrix_its_boxes_and_the_layout_of_their_rows():
    pytest.importorskip("triton.experimental.gluon")
    bfloat = torch.zeros(100, 4, 64, dtype=torch.bfloat16)
    tile = TileDescriptor(bfloat, (100, 256), (64, 64)).for_triton()
    assert (tile.shape, tile.strides, tile.block_shape) == ([100, 256], [256, 1], [64, 64])
    assert (tile.layout.swizzle_byte_width, tile.layout.element_bitwidth) == (128, 16)
    line = TileDescriptor(torch.zeros(2, 12, 192), (24, 192), (1, 64)).for_triton()
    assert (line.layout.swizzle_byte_width, line.layout.element_bitwidth) == (0, 32)


def test_an_integer_that_triton_would_specialise_on_is_refused(compilations):
    with pytest.raises(TypeError, match=r"count of careless_kernel.*do_not_specialize"):
        launcher.run(careless_kernel, (1,), torch.zeros(16), 3, 16)
    assert compilations == []
