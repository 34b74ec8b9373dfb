"""Run a module of this folder under the Triton interpreter: `… interpret MODULE [CASE …]`.

The interpreter replaces the functions of `triton.language` again at every call of a helper, which
is a quarter of its time, and makes a table of dtypes at every operation. Here it does both once.
"""

import os
import runpy
import sys

os.environ["TRITON_INTERPRET"] = "1"  # kernels ask when they are imported

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_patch_lang, _get_np_dtype = interpreter._patch_lang, interpreter._get_np_dtype
_numpy_dtypes: dict[str, np.dtype] = {}


def patch_once(fn):
    """Replace what a function sees of `triton.language`, unless its caller has done so."""
    seen = [module for module in (tl, tl.core) if module in fn.__globals__.values()]
    if seen and not any(tl.core.is_builtin(module.load) for module in seen):
        return interpreter._LangPatchScope()
    return _patch_lang(fn)


def remember_dtype(dtype) -> np.dtype:
    """The numpy dtype of a type of Triton, or of the elements of a block."""
    name = str(dtype.scalar)
    if name not in _numpy_dtypes:
        _numpy_dtypes[name] = _get_np_dtype(dtype)
    return _numpy_dtypes[name]


if __name__ == "__main__":
    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, remember_dtype
    name = sys.argv[1]
    sys.argv = [name, *sys.argv[2:]]
    runpy.run_module(f"{__package__}.{name}", run_name="__main__")
