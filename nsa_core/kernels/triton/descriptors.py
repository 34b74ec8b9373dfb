"""Tensors as the copy engine of Hopper (TMA) sees them: two axes, cut into boxes."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

ROW_BYTES = 128  # a box with rows of as many bytes is swizzled, so that products read no bank twice


@dataclass(frozen=True, slots=True)
class TileDescriptor:
    """What Triton needs at a launch to encode a tensor's map; `for_triton` is what it compiles for.

    Triton's own class checks itself for 5 us whenever it is made, and one is made for each launch.
    """

    base: Tensor
    shape: tuple[int, int]
    strides: tuple[int, int]
    block_shape: tuple[int, int]
    padding: str = "zero"
    round_f32_to_tf32: bool = False

    def for_triton(self) -> Any:
        """The same as Triton's own class."""
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        swizzle = ROW_BYTES if self.block_shape[0] > 1 else 0
        layout = gl.NVMMASharedLayout(swizzle, 8 * self.base.itemsize, 2)
        return TensorDescriptor(
            self.base, list(self.shape), list(self.strides), list(self.block_shape), layout
        )


def tiles_of(tensor: Tensor, rows: int, columns: int) -> TileDescriptor:
    """A contiguous tensor [R, ...] as a matrix of R rows, in boxes of `rows` by `columns`."""
    width = tensor.numel() // tensor.shape[0]
    return TileDescriptor(tensor, (tensor.shape[0], width), (width, 1), (rows, columns))


def lines_of(tensor: Tensor, columns: int) -> TileDescriptor:
    """A contiguous tensor [..., C] as a matrix of rows of C numbers, in pieces of one row."""
    width = tensor.shape[-1]
    return TileDescriptor(tensor, (tensor.numel() // width, width), (width, 1), (1, columns))
