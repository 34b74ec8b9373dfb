"""Launch a compiled kernel again without Triton's own look at every argument.

Triton's launch takes the host 30 us where Python is fast and twice that where it is slow, and a
layer makes some 40 launches forward and backward, which at 8,192 tokens a document was more than
the card needs for the work. Here a kernel's compiled form is found by what may decide its machine
code: constants, launch options, and dtype and alignment of the tensors. Numbers must not decide
it: every one of them is `do_not_specialize`, or a float. The boxes of a descriptor follow from the
constants; Triton encodes its map at every launch, which takes a microsecond.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from nsa_core.kernels.triton.descriptors import TileDescriptor

Grid = tuple[int, ...]
_ALIGNMENT_MASK = 15  # Triton compiles for pointers that are multiples of 16 bytes, or are not


@dataclass(frozen=True)
class _Arguments:
    """Where a kernel takes its tensors, the descriptors of tensors, and its constants."""

    tensors: tuple[int, ...]
    descriptors: tuple[int, ...]
    constants: tuple[int, ...]


_ARGUMENTS: dict[int, _Arguments] = {}
_COMPILED: dict[tuple[Any, ...], CompiledKernel] = {}


def run(kernel: JITFunction, grid: Grid, *args: Any, **options: int) -> None:
    """Launch `kernel` on the current stream; every argument is positional."""
    if not isinstance(kernel, JITFunction):  # under the interpreter
        kernel[grid](*args, **options)
        return
    key = _key(kernel, args, options)
    compiled = _COMPILED.get(key)
    if compiled is None:
        given = [arg.for_triton() if isinstance(arg, TileDescriptor) else arg for arg in args]
        compiled = kernel[grid](*given, **options)
        if isinstance(compiled, CompiledKernel):
            _COMPILED[key] = compiled
        return
    compiled[grid + (1,) * (3 - len(grid))](*args)


def _key(kernel: JITFunction, args: tuple[Any, ...], options: dict[str, int]) -> tuple[Any, ...]:
    where = _ARGUMENTS.get(id(kernel))
    if where is None:
        where = _ARGUMENTS[id(kernel)] = _look(kernel, args)
    tensors = [args[i] for i in where.tensors]
    tensors += [args[i].base for i in where.descriptors]
    pointers = [tensor.data_ptr() for tensor in tensors]
    low_bits = 0
    for pointer in pointers:
        low_bits |= pointer & _ALIGNMENT_MASK
    return (
        id(kernel),
        tensors[0].get_device(),
        *[args[i] for i in where.constants],
        *[tensor.dtype for tensor in tensors],
        # Nearly always all are aligned.
        tuple([pointer & _ALIGNMENT_MASK == 0 for pointer in pointers]) if low_bits else None,
        *options.values(),
    )


def _look(kernel: JITFunction, args: tuple[Any, ...]) -> _Arguments:
    """Sort the parameters of a kernel once.

    Raises:
        TypeError: If Triton would look at the value of an integer.
    """
    tensors, descriptors, constants = [], [], []
    for i, (parameter, value) in enumerate(zip(kernel.params, args, strict=True)):
        if parameter.is_constexpr:
            constants.append(i)
        elif isinstance(value, Tensor):
            tensors.append(i)
        elif isinstance(value, TileDescriptor):
            descriptors.append(i)
        elif isinstance(value, int) and not parameter.do_not_specialize:
            message = f"{parameter.name} of {kernel.__name__} has to be in do_not_specialize"
            raise TypeError(message)
    return _Arguments(tuple(tensors), tuple(descriptors), tuple(constants))
