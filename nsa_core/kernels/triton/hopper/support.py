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
        heads: Of a work item, one for each warpgroup that multiplies; the forward is written for 2,
            dq for 2 or 3.
        stages: Tiles of the ring of keys.
        query_stages: Work items whose rows are in shared memory at a time; in the forward 2.
    """

    heads: int
    stages: int
    query_stages: int
    max_registers: int = 168
    worker_registers: int = 240


#: By width. Narrow heads go forward as fast, or faster, in the Triton kernels.
FORWARD = {128: WalkLaunch(heads=2, stages=4, query_stages=2)}
QUERY_GRADIENT = {
    64: WalkLaunch(heads=3, stages=3, query_stages=1, max_registers=128, worker_registers=160),
    128: WalkLaunch(heads=2, stages=3, query_stages=1),
}


@dataclass(frozen=True)
class ItemLaunch:
    """How the backward of items is launched; registers as above, `gather` of the warps that copy.

    Attributes:
        stages: Tiles of rows in a lane's ring.
        key_stages: Items whose keys and values are in shared memory at a time.
        gather_warps: Of a lane, beside its warpgroup.
        near_until: Longest document whose dq is added in runs of 64 bytes; beyond it, where dq does
            not stay in the cache, in lines of 128.
    """

    stages: int
    key_stages: int
    gather_warps: int
    near_until: int
    max_registers: int = 168
    worker_registers: int = 216
    gather_registers: int = 72


ITEM_BACKWARD = ItemLaunch(stages=3, key_stages=2, gather_warps=1, near_until=8192)
ITEM_WIDTH = 64


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
    launches: dict[int, WalkLaunch], dtype: torch.dtype, widths: tuple[int, int] | None,
    heads: tuple[int, int] | None,
) -> str | None:  # fmt: skip
    """Why a walk over keys is not Hopper's where `refusal` has nothing to say, or None.

    Args:
        launches: `FORWARD` or `QUERY_GRADIENT`.
        dtype: Of the inputs.
        widths: Of keys and of values; None is not known, not judged.
        heads: Query heads and groups, likewise.
    """
    if widths is not None and widths[0] not in launches:
        return f"heads are {widths[0]} wide, not {' or '.join(map(str, launches))}"
    if widths is not None and heads is not None:
        together, in_group = launches[widths[0]].heads, heads[0] // heads[1]
        if in_group % together:
            return f"a group has {in_group} heads, not a multiple of {together}"
    if dtype != torch.bfloat16:
        return f"the inputs are {dtype}, not bfloat16"
    return None


def items_refusal(widths: tuple[int, int] | None) -> str | None:
    """Why the backward of items is not Hopper's where `refusal` has nothing to say, or None.

    It serves what adds in atomics: in order, the Triton kernel does.
    """
    if widths is not None and widths[0] != ITEM_WIDTH:
        return f"heads are {widths[0]} wide, not {ITEM_WIDTH}"
    return None


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a card; of an H100, where launches are only recorded."""
    if device.type == "cpu":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def takes_forward(q: Tensor, k: Tensor, v: Tensor, select_block: int) -> bool:
    """Whether the forward of these tensors is Hopper's."""
    return _takes_walk(FORWARD, q, k, v, select_block)


def takes_query_gradient(q: Tensor, k: Tensor, v: Tensor, select_block: int) -> bool:
    """Whether dq of these tensors is Hopper's."""
    return _takes_walk(QUERY_GRADIENT, q, k, v, select_block)


def _takes_walk(
    launches: dict[int, WalkLaunch], q: Tensor, k: Tensor, v: Tensor, select_block: int
) -> bool:
    widths, heads = (q.shape[2], v.shape[2]), (q.shape[1], k.shape[1])
    reason = walk_refusal(launches, q.dtype, widths, heads)
    return reason is None and takes_planes(q, v, select_block)


def takes_items(q: Tensor, v: Tensor, select_block: int) -> bool:
    """Whether the backward of these tensors' items is Hopper's where it adds in atomics."""
    reason = items_refusal((q.shape[2], v.shape[2]))
    return reason is None and takes_planes(q, v, select_block)


def takes_planes(q: Tensor, v: Tensor, select_block: int) -> bool:
    """Whether these tensors' backward is Hopper's, which takes the terms of rows as planes."""
    widths = q.shape[2], v.shape[2]
    return refusal(device_capability(q.device), q.dtype, widths, select_block) is None
