"""Host side of `key_gradient_kernel.py`."""

import torch
import triton
from torch import Tensor

from nsa_core.kernels.triton.descriptors import lines_of, tiles_of
from nsa_core.kernels.triton.hopper.key_gradient_kernel import hopper_key_gradient_kernel
from nsa_core.kernels.triton.hopper.support import KEY_GRADIENT, segment_tokens
from nsa_core.kernels.triton.launcher import run
from nsa_core.kernels.triton.rows import COMPRESSED
from nsa_core.kernels.triton.sources import LOG2E, GradientSource
from nsa_core.kernels.triton.tiles import Documents, num_slots, tile_documents

_KEYS = 128  # of a program
_TOKENS = 64  # of a tile
_MAX_COPIES = 16
_WHOLE = 1 << 30  # a segment no document outgrows


def key_gradient(
    q: Tensor, grad: Tensor, source: GradientSource, docs: Documents,
    into: tuple[Tensor, Tensor], *, deterministic: bool,
) -> None:  # fmt: skip
    """As `attention.key_gradient`, for terms in planes."""
    mode = source.mode
    if source.k.shape[0] == 0:
        return
    if mode.kind != COMPRESSED.value:
        _launch(q, grad, source, docs, into, segment=_WHOLE, atomic=False)
        return
    segment = segment_tokens(docs.max_seqlen)
    if deterministic:
        segment *= max(1, triton.cdiv(docs.max_seqlen, _MAX_COPIES * segment))
    copies = max(1, triton.cdiv(docs.max_seqlen, segment)) if deterministic else 1
    sums = [of.new_zeros(copies, *of.shape, dtype=torch.float32) for of in (source.k, source.v)]
    _launch(q, grad, source, docs, (sums[0], sums[1]), segment=segment, atomic=not deterministic)
    for target, of in zip(into, sums, strict=True):
        target.copy_(of.sum(0) if copies > 1 else of[0])


def _launch(
    q: Tensor, grad: Tensor, source: GradientSource, docs: Documents,
    into: tuple[Tensor, Tensor], *, segment: int, atomic: bool,
) -> None:  # fmt: skip
    mode, k, v = source.mode, source.k, source.v
    width, groups = q.shape[2], k.shape[1]
    launch = KEY_GRADIENT[width]
    tile = _KEYS * mode.stride
    tiles = tile_documents(docs.cu_seqlens, docs.num_tokens, tile)
    slots = num_slots(docs.num_tokens, docs.num_documents, tile)
    segments = max(1, triton.cdiv(docs.max_seqlen, segment))
    terms = lines_of(source.terms.by_head, _TOKENS)
    run(
        hopper_key_gradient_kernel, (slots, groups, segments),
        tiles_of(q, _TOKENS, width), tiles_of(grad, _TOKENS, width), terms,
        terms if mode.bits is None else lines_of(mode.bits, _TOKENS),
        tiles_of(k, 64, width), tiles_of(v, 64, width), *into, tiles, docs.cu_seqlens,
        mode.num_words, segment, 0 if atomic else k.shape[0],
        width**-0.5 * LOG2E, width**-0.5,
        mode.kind, mode.span, mode.stride, groups, q.shape[1] // groups, width, _TOKENS,
        launch.stages, launch.in_registers, launch.ahead, launch.clear, atomic,
        launch.sum_registers, num_warps=4, maxnreg=launch.max_registers,
    )  # fmt: skip
