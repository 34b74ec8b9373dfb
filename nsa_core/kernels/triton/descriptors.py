"""Tensors as the copy engine of Hopper (TMA) sees them: two axes, cut into boxes."""

from typing import Any

from torch import Tensor

ROW_BYTES = 128  # a box with rows of as many bytes is swizzled, so that products read no bank twice


class TileDescriptor:
    """What Triton needs at a launch to encode a tensor's map; `for_triton` is what it compiles for.

    Triton's own class checks itself for 5 us whenever it is made, and one is made for each launch;
    a frozen dataclass takes about as long. Triton reads the attributes by these names.

    Args:
        base: A contiguous tensor.
        size: Rows and columns of the matrix that it is seen as.
        box: Rows and columns of what one copy brings.
    """

    __slots__ = ("base", "block_shape", "padding", "round_f32_to_tf32", "shape", "strides")

    def __init__(self, base: Tensor, size: tuple[int, int], box: tuple[int, int]) -> None:
        self.base = base
        self.shape = size
        self.strides = (size[1], 1)
        self.block_shape = box
        self.padding = "zero"
        self.round_f32_to_tf32 = False

    def for_triton(self) -> Any:
        """The same as Triton's own class."""
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        swizzle = ROW_BYTES if self.block_shape[0] > 1 else 0
        layout = gl.NVMMASharedLayout(swizzle, 8 * self.base.itemsize, 2)
        return TensorDescriptor(
            self.base, list(self.shape), list(self.strides), list(self.block_shape), layout
        )
