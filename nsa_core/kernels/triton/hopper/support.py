"""Where the Gluon kernels for Hopper run, and with which sizes; loads no Gluon.

A version of Triton is named here once its code has been compared with the reference on a card:
ptxas has made wrong code of a Gluon kernel without a message. Everything else is served by the
Triton kernels beside this package, and the reason is recorded with the choice of the backend.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from nsa_core.kernels.triton.launch import device_capability

CAPABILITY = (9, 0)
#: Both on an H200: docs/kernel-experiments.md.
PROVEN_TRITON = ("3.6.0", "3.7.1")
DTYPES = (torch.bfloat16, torch.float16)
WIDTHS = (64, 128)
SELECT_BLOCK = 64


@dataclass(frozen=True)
class KeyGradientLaunch:
    """How the key gradient of one head width is launched.

    Attributes:
        stages: Tiles of the ring.
        in_registers: K and V are register operands of the products.
        ahead: The next tile's scores are made while this tile's exponentials are.
        max_registers: Of a thread at the start of the kernel: what the three roles share.
        sum_registers: Of a thread of the two warpgroups that multiply.
    """

    stages: int
    in_registers: bool
    ahead: bool
    max_registers: int = 168
    sum_registers: int = 240


KEY_GRADIENT = {
    64: KeyGradientLaunch(stages=4, in_registers=True, ahead=True),
    128: KeyGradientLaunch(stages=3, in_registers=False, ahead=False),
}


@dataclass(frozen=True)
class WalkLaunch:
    """How a kernel that walks over keys is launched; registers as above, `worker` for `sum`.

    Attributes:
        stages: Tiles of the ring of keys.
        query_stages: Work items whose rows are in shared memory at a time.
    """

    stages: int
    query_stages: int
    max_registers: int = 168
    worker_registers: int = 240


#: Of wide heads: narrow ones are served as fast, or faster, by the Triton kernels.
FORWARD = WalkLaunch(stages=4, query_stages=2)
QUERY_GRADIENT = WalkLaunch(stages=3, query_stages=1)
WALK_WIDTH = 128
#: Forward and dq are younger than the key gradients: on an H200, docs/kernel-experiments.md.
PROVEN_WALK = ("3.6.0",)


def segment_tokens(max_seqlen: int) -> int:
    """Queries per program of the compressed key gradient, a multiple of a token tile."""
    if max_seqlen >= 32768:
        return 2048
    return 1024 if max_seqlen >= 16384 else 512


def refusal(
    capability: tuple[int, int] | None, dtype: torch.dtype, widths: tuple[int, int] | None,
    select_block: int | None,
) -> str | None:  # fmt: skip
    """Why the Gluon kernels do not serve these, or None; what is None is not known, not judged."""
    if capability != CAPABILITY:
        return "the card is not sm_90"
    if triton.__version__ not in PROVEN_TRITON:
        return f"not proven on Triton {triton.__version__}, but on {', '.join(PROVEN_TRITON)}"
    if dtype not in DTYPES:
        return f"the inputs are {dtype}"
    if widths is not None and (widths[0] != widths[1] or widths[0] not in WIDTHS):
        return f"keys and values are {widths[0]} and {widths[1]} wide, not both 64 or both 128"
    if select_block not in {None, SELECT_BLOCK}:
        return f"the selection block has {select_block} tokens, not {SELECT_BLOCK}"
    return None


def walk_refusal(
    dtype: torch.dtype, widths: tuple[int, int] | None, heads: tuple[int, int] | None
) -> str | None:
    """Why forward and dq are not Hopper's where `refusal` has nothing to say, or None."""
    if widths is not None and widths[0] != WALK_WIDTH:
        return f"heads are {widths[0]} wide, not {WALK_WIDTH}"
    if heads is not None and heads[0] // heads[1] % 2:
        return f"a group has {heads[0] // heads[1]} heads, an odd number"
    if dtype != torch.bfloat16:
        return f"the inputs are {dtype}, not bfloat16"
    if triton.__version__ not in PROVEN_WALK:
        return f"not proven on Triton {triton.__version__}, but on {', '.join(PROVEN_WALK)}"
    return None


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a card; of an H100, where launches are only recorded."""
    if device.type == "cpu":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def takes_walk(q: Tensor, k: Tensor, v: Tensor, select_block: int) -> bool:
    """Whether forward and dq of these tensors are Hopper's."""
    widths, heads = (q.shape[2], v.shape[2]), (q.shape[1], k.shape[1])
    if walk_refusal(q.dtype, widths, heads) is not None:
        return False
    return refusal(device_capability(q.device), q.dtype, widths, select_block) is None


def takes_planes(q: Tensor, v: Tensor, select_block: int) -> bool:
    """Whether these tensors' backward is Hopper's, which takes the terms of rows as planes."""
    widths = q.shape[2], v.shape[2]
    return refusal(device_capability(q.device), q.dtype, widths, select_block) is None
