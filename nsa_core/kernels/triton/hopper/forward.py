"""Host side of `forward_kernel.py`."""

from torch import Tensor

from nsa_core.kernels.triton.descriptors import TileDescriptor
from nsa_core.kernels.triton.document_slots import Documents
from nsa_core.kernels.triton.hopper.forward_kernel import hopper_forward_kernel
from nsa_core.kernels.triton.hopper.support import FORWARD, multiprocessors
from nsa_core.kernels.triton.launcher import run
from nsa_core.kernels.triton.sources import LOG2E, Mode

_TOKENS = 64  # of a work item
_KEYS = 64  # of a tile: one selection block


def forward(
    q: Tensor, k: Tensor, v: Tensor, docs: Documents, mode: Mode, into: tuple[Tensor, Tensor]
) -> None:
    """As `attend_host.forward`."""
    num_tokens, num_heads, width = q.shape
    num_keys, groups, _ = k.shape
    launch = FORWARD[width]
    items = docs.num_slots * (num_heads // launch.heads)
    keys = (num_keys, groups * width)
    run(
        hopper_forward_kernel, (min(multiprocessors(q.device), items),),
        TileDescriptor(q, (num_tokens, num_heads * width), (_TOKENS, width)),
        TileDescriptor(k, keys, (_KEYS, width)), TileDescriptor(v, keys, (_KEYS, width)),
        docs.tile_document if mode.bits is None else mode.bits, *into,
        docs.tile_document, docs.cu_seqlens, docs.num_slots, items, mode.num_words,
        width**-0.5 * LOG2E, mode.kind, mode.span, mode.stride, groups, num_heads // groups, width,
        _KEYS, launch.stages, launch.worker_registers,
        num_warps=4, maxnreg=launch.max_registers,
    )  # fmt: skip
