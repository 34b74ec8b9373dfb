"""Host side of `query_gradient_kernel.py`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa_core.kernels.triton.descriptors import TileDescriptor
from nsa_core.kernels.triton.document_slots import Documents
from nsa_core.kernels.triton.hopper.query_gradient_kernel import hopper_query_gradient_kernel
from nsa_core.kernels.triton.hopper.support import QUERY_GRADIENT, multiprocessors
from nsa_core.kernels.triton.launcher import run
from nsa_core.kernels.triton.rows import CHOSEN, COMPRESSED, SLIDING
from nsa_core.kernels.triton.sources import LOG2E, GradientSource

_TOKENS = 64  # of a work item
_KEYS = 64  # of a tile: one selection block


def query_gradient(
    q: Tensor, grad: Tensor, sources: Sequence[GradientSource], docs: Documents,
    *, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """As `attend_host.query_gradient`, for terms in planes."""
    num_tokens, num_heads, width = q.shape
    by_kind = {source.mode.kind: source for source in sources}
    given = [by_kind.get(kind.value) for kind in (COMPRESSED, SLIDING, CHOSEN)]
    compressed, sliding, chosen = (None if one is None else one.mode for one in given)
    held = [one or sources[0] for one in given]
    groups = held[0].k.shape[1]
    rows = (num_tokens, num_heads * width)
    keys = [
        TileDescriptor(of, (of.shape[0], groups * width), (_KEYS, width))
        for source in held
        for of in (source.k, source.v)
    ]
    launch = QUERY_GRADIENT[width]
    dq = torch.empty_like(q, dtype=dtype)
    items = docs.num_slots * (num_heads // launch.heads)
    run(
        hopper_query_gradient_kernel, (min(multiprocessors(q.device), items),),
        TileDescriptor(q, rows, (_TOKENS, width)), TileDescriptor(grad, rows, (_TOKENS, width)),
        *keys, dq, *(source.terms.by_head for source in held),
        docs.tile_document if chosen is None else chosen.bits, docs.tile_document, docs.cu_seqlens,
        docs.num_slots, items, 0 if chosen is None else chosen.num_words,
        width**-0.5 * LOG2E, width**-0.5, *(one is not None for one in given),
        *((0, 1) if compressed is None else (compressed.span, compressed.stride)),
        1 if sliding is None else sliding.span,
        groups, num_heads // groups, launch.heads, width, _KEYS, launch.stages,
        launch.query_stages, launch.worker_registers, num_warps=4, maxnreg=launch.max_registers,
    )  # fmt: skip
    return dq
