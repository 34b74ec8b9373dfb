"""Host side of `key_gradient_kernel.py`."""

from torch import Tensor

from nsa_core.kernels.triton.descriptors import TileDescriptor
from nsa_core.kernels.triton.document_slots import Documents, tile_documents
from nsa_core.kernels.triton.hopper.key_gradient_kernel import hopper_key_gradient_kernel
from nsa_core.kernels.triton.hopper.support import KEY_GRADIENT, segment_tokens
from nsa_core.kernels.triton.key_sums import new_sums, round_sums
from nsa_core.kernels.triton.launcher import run
from nsa_core.kernels.triton.rows import COMPRESSED
from nsa_core.kernels.triton.sizes import cdiv
from nsa_core.kernels.triton.sources import LOG2E, GradientSource

_KEYS = 128  # of a program
_TOKENS = 64  # of a tile
_MAX_COPIES = 16
_WHOLE = 1 << 30  # a segment no document outgrows


def key_gradient(
    q: Tensor, grad: Tensor, source: GradientSource, docs: Documents,
    into: tuple[Tensor, Tensor], *, deterministic: bool,
) -> None:  # fmt: skip
    """As `attend_host.key_gradient`, for terms in planes."""
    mode = source.mode
    if source.k.shape[0] == 0:
        return
    if mode.kind != COMPRESSED.value:
        _launch(q, grad, source, docs, docs.tile_document, into, segment=_WHOLE, atomic=False)
        return
    segment = segment_tokens(docs.max_seqlen)
    if deterministic:
        segment *= max(1, cdiv(docs.max_seqlen, _MAX_COPIES * segment))
    copies = max(1, cdiv(docs.max_seqlen, segment)) if deterministic else 1
    sums = new_sums(source.k, source.v, copies)
    tiles = tile_documents(docs.cu_seqlens, docs.num_tokens, _KEYS * mode.stride)
    _launch(q, grad, source, docs, tiles, sums, segment=segment, atomic=not deterministic)
    round_sums(sums, into)


def _launch(
    q: Tensor, grad: Tensor, source: GradientSource, docs: Documents, tiles: Tensor,
    into: tuple[Tensor, Tensor], *, segment: int, atomic: bool,
) -> None:  # fmt: skip
    mode, k, v = source.mode, source.k, source.v
    num_tokens, num_heads, width = q.shape
    num_keys, groups, _ = k.shape
    launch = KEY_GRADIENT[width]
    segments = max(1, cdiv(docs.max_seqlen, segment))
    rows, keys = (num_tokens, num_heads * width), (num_keys, groups * width)
    terms = TileDescriptor(source.terms.by_head, (2 * num_heads, docs.num_padded), (1, _TOKENS))
    words = groups * mode.num_words
    run(
        hopper_key_gradient_kernel, (tiles.shape[0], groups, segments),
        TileDescriptor(q, rows, (_TOKENS, width)), TileDescriptor(grad, rows, (_TOKENS, width)),
        terms,
        terms if mode.bits is None
        else TileDescriptor(mode.bits, (words, docs.num_padded), (1, _TOKENS)),
        TileDescriptor(k, keys, (64, width)), TileDescriptor(v, keys, (64, width)),
        *into, tiles, docs.cu_seqlens,
        mode.num_words, segment, 0 if atomic else num_keys, width**-0.5 * LOG2E, width**-0.5,
        mode.kind, mode.span, mode.stride, groups, num_heads // groups, width, _TOKENS,
        launch.stages, launch.in_registers, launch.ahead, atomic,
        launch.sum_registers, num_warps=4, maxnreg=launch.max_registers,
    )  # fmt: skip
