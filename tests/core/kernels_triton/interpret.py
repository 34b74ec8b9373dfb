"""Run a module of this folder under the Triton interpreter: `… interpret MODULE [CASE …]`.

The interpreter replaces the functions of `triton.language` again at every call of a helper, makes a
table of dtypes at every operation, and the same type and shape for every tensor. Here it does each
once. It also looks for an overflow at every sum and product of indices, with six operations more:
the inputs of these modules have fewer than 2^20 elements, so it can find none. Together this
was three quarters of its time.
"""

import dataclasses
import math
import os
import runpy
import sys

os.environ["TRITON_INTERPRET"] = "1"  # kernels ask when they are imported

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_patch_lang, _get_np_dtype = interpreter._patch_lang, interpreter._get_np_dtype
_make_block_type = tl.block_type.__init__
_languages: dict[str, list] = {}
_numpy_dtypes: dict[str, np.dtype] = {}
_block_types: dict[tuple, dict] = {}


def patch_once(fn):
    """Replace what a function sees of `triton.language`, unless its caller has done so."""
    module = fn.__module__
    if module not in _languages:
        _languages[module] = [seen for seen in (tl, tl.core) if seen in fn.__globals__.values()]
    if _languages[module] and not any(tl.core.is_builtin(seen.load) for seen in _languages[module]):
        return interpreter._LangPatchScope()
    return _patch_lang(fn)


def remember_dtype(dtype) -> np.dtype:
    """The numpy dtype of a type of Triton, or of the elements of a block."""
    name = str(dtype.scalar)
    if name not in _numpy_dtypes:
        _numpy_dtypes[name] = _get_np_dtype(dtype)
    return _numpy_dtypes[name]


def describe_shape(shape) -> dict:
    """What a tensor says of its shape."""
    sizes = tl.tuple([tl.constexpr(size) for size in shape])
    return {"shape": sizes, "numel": tl.constexpr(math.prod(shape))}


SCALAR = describe_shape(())


def make_block_type(self, element_ty, shape) -> None:
    """`block_type.__init__`, which checks and describes each shape of each element once."""
    key = (str(element_ty), *shape)
    if key not in _block_types:
        _make_block_type(self, element_ty, shape)
        self.of_tensor = describe_shape(self.shape)
        _block_types[key] = vars(self)
    vars(self).update(_block_types[key])


def make_tensor(self, handle, type) -> None:
    """`tensor.__init__`, with one shape for all tensors of a type."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    vars(self).update(type.of_tensor if type.is_block() else SCALAR)


if __name__ == "__main__":
    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, remember_dtype
    tl.block_type.__init__, tl.tensor.__init__ = make_block_type, make_tensor
    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )
    name = sys.argv[1]
    sys.argv = [name, *sys.argv[2:]]
    runpy.run_module(f"{__package__}.{name}", run_name="__main__")
