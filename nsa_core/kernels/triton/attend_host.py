"""Host side of `attend.py`: launch a mode's forward and backward over packed documents."""

import importlib
from collections.abc import Sequence
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from nsa_core.kernels.triton.attend import (
    attend_forward_kernel,
    attend_key_gradient_kernel,
    attend_query_gradient_kernel,
)
from nsa_core.kernels.triton.document_slots import Documents, num_slots, tile_documents
from nsa_core.kernels.triton.hopper.support import takes_forward, takes_query_gradient
from nsa_core.kernels.triton.key_sums import new_sums, round_sums
from nsa_core.kernels.triton.launch import Kernel, key_tile, launch_for, policy_for, row_tile
from nsa_core.kernels.triton.launcher import run
from nsa_core.kernels.triton.rows import CHOSEN, COMPRESSED, SLIDING
from nsa_core.kernels.triton.sizes import cdiv
from nsa_core.kernels.triton.sources import LOG2E, GradientSource, Mode

_WHOLE = 1 << 30  # a segment no document outgrows


@cache
def hopper(name: str) -> ModuleType:
    """A module of Gluon kernels; imported on a card they serve, with a Triton that has this Gluon.

    `name` is `forward`, `query_gradient`, `key_gradient` or `item_backward`.
    """
    return importlib.import_module(f"nsa_core.kernels.triton.hopper.{name}")


def forward(
    q: Tensor, k: Tensor, v: Tensor, docs: Documents, mode: Mode, into: tuple[Tensor, Tensor]
) -> None:
    """Attend one way.

    Writes out [N, H, E] in q's dtype and the natural log normaliser [N, H] in float32 `into`; 0
    and -inf where a row sees nothing.
    """
    if takes_forward(q, k, v, docs.block):
        hopper("forward").forward(q, k, v, docs, mode, into)
        return
    num_heads, key_width = q.shape[1:]
    groups, value_width = k.shape[1], v.shape[2]
    heads = num_heads // groups
    launch = launch_for(_forward_kernel(q, v, docs, mode), q.device, key_width, value_width)
    rows = row_tile(launch, docs.block, heads)
    keys = docs.block if mode.bits is not None else launch.keys
    bits = docs.tile_document if mode.bits is None else mode.bits
    grid = (docs.num_slots * (docs.block * heads // rows), groups)
    run(
        attend_forward_kernel, grid,
        q, k, v, bits, *into, docs.tile_document, docs.cu_seqlens,
        docs.num_padded, mode.num_words, key_width**-0.5 * LOG2E,
        mode.kind, mode.span, mode.stride, docs.block, groups, heads, key_width, value_width,
        rows, keys, launch.stages, **launch.options(),
    )  # fmt: skip


def _forward_kernel(q: Tensor, v: Tensor, docs: Documents, mode: Mode) -> Kernel:
    """Name in the launch table."""
    policy = policy_for(q.device, q.shape[2], v.shape[2])
    if mode.kind == COMPRESSED.value and docs.max_seqlen <= policy.short_until:
        return "short_compressed_forward"
    return mode.kernel("forward")


def query_gradient(
    q: Tensor, grad: Tensor, sources: Sequence[GradientSource], docs: Documents,
    *, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Gradient of q summed over branches of different modes, in `dtype` (of q if left out).

    `grad` [N, H, E] is the gradient of the gated sum of their outputs.
    """
    filler = sources[0]
    if filler.terms.is_planes and takes_query_gradient(q, filler.k, filler.v, docs.block):
        gradient: Tensor = hopper("query_gradient").query_gradient(
            q, grad, sources, docs, dtype=dtype
        )
        return gradient
    num_heads, key_width = q.shape[1:]
    by_kind = {source.mode.kind: source for source in sources}
    kinds = (COMPRESSED.value, SLIDING.value, CHOSEN.value)
    given = [by_kind.get(kind) for kind in kinds]
    tensors = [
        tensor
        for source in (one or filler for one in given)
        for tensor in (source.k, source.v, source.terms.offset, source.terms.delta)
    ]
    compressed, sliding, chosen = (None if one is None else one.mode for one in given)
    groups, value_width = filler.k.shape[1], filler.v.shape[2]
    heads = num_heads // groups
    dq = torch.empty_like(q, dtype=dtype)
    launch = launch_for("query_gradient", q.device, key_width, value_width)
    rows = row_tile(launch, docs.block, heads)
    grid = (docs.num_slots * (docs.block * heads // rows), groups)
    run(
        attend_query_gradient_kernel, grid,
        q, grad, *tensors, docs.tile_document if chosen is None else chosen.bits, dq,
        docs.tile_document, docs.cu_seqlens,
        docs.num_padded, 0 if chosen is None else chosen.num_words,
        key_width**-0.5 * LOG2E, key_width**-0.5,
        *(one is not None for one in given),
        *((0, 1) if compressed is None else (compressed.span, compressed.stride)),
        0 if sliding is None else sliding.span,
        docs.block, groups, heads, key_width, value_width,
        rows, launch.keys, launch.stages, **launch.options(),
    )  # fmt: skip
    return dq


def key_gradient(
    q: Tensor, grad: Tensor, source: GradientSource, docs: Documents, into: tuple[Tensor, Tensor],
    *, deterministic: bool,
) -> None:  # fmt: skip
    """Write the gradients of k and v of one branch to `into`; arguments as in `query_gradient`.

    The form of the terms says which kernel they were made for (`hopper/support.py`).
    """
    mode, k, v = source.mode, source.k, source.v
    if source.terms.is_planes:
        hopper("key_gradient").key_gradient(
            q, grad, source, docs, into, deterministic=deterministic
        )
        return
    if mode.kind == COMPRESSED.value:
        _compressed_key_gradient(q, grad, source, docs, into, deterministic=deterministic)
        return
    launch = launch_for(mode.kernel("key_gradient"), q.device, q.shape[2], v.shape[2])
    dk, dv = into
    keys = key_tile(launch, docs.block)
    grid = (docs.num_slots, k.shape[1], 1)
    bits = docs.tile_document if mode.bits is None else mode.bits
    run(
        attend_key_gradient_kernel, grid,
        q, k, v, grad, source.terms.by_head, bits, dk, dv, docs.tile_document, docs.cu_seqlens,
        docs.num_padded, mode.num_words, _WHOLE, 0,
        q.shape[2]**-0.5 * LOG2E, q.shape[2]**-0.5,
        mode.kind, mode.span, mode.stride, docs.block, k.shape[1], q.shape[1] // k.shape[1],
        q.shape[2], v.shape[2], launch.rows, keys, launch.stages, False, **launch.options(),
    )  # fmt: skip


def _compressed_key_gradient(
    q: Tensor, grad: Tensor, source: GradientSource, docs: Documents, into: tuple[Tensor, Tensor],
    *, deterministic: bool,
) -> None:  # fmt: skip
    """Split the many rows of the few compressed keys into segments, and sum the segments.

    Atomics add them in float32 in any order; `deterministic` writes at most 16 copies and sums
    those.
    """
    mode, k, v = source.mode, source.k, source.v
    launch = launch_for(mode.kernel("key_gradient"), q.device, q.shape[2], v.shape[2])
    segment = policy_for(q.device, q.shape[2], v.shape[2]).segment_tokens
    if deterministic:
        segment *= max(1, cdiv(docs.max_seqlen, 16 * segment))
    segments = max(1, cdiv(docs.max_seqlen, segment))
    copies = segments if deterministic else 1
    sums = new_sums(k, v, copies)
    tile = launch.keys * mode.stride
    tiles = tile_documents(docs.cu_seqlens, docs.num_tokens, tile)
    grid = (num_slots(docs.num_tokens, docs.num_documents, tile), k.shape[1], segments)
    run(
        attend_key_gradient_kernel, grid,
        q, k, v, grad, source.terms.by_head, tiles, *sums, tiles, docs.cu_seqlens,
        docs.num_padded, 0, segment, k.shape[0],
        q.shape[2]**-0.5 * LOG2E, q.shape[2]**-0.5,
        mode.kind, mode.span, mode.stride, docs.block, k.shape[1], q.shape[1] // k.shape[1],
        q.shape[2], v.shape[2], launch.rows, launch.keys, launch.stages, not deterministic,
        **launch.options(),
    )  # fmt: skip
    round_sums(sums, into)
