"""Choose the selection blocks of every token, a chunk of tokens at a time."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nsa_core.kernels.triton.document_slots import Documents
from nsa_core.kernels.triton.launch import INTERPRETER, Launch, device_architecture, launch_for
from nsa_core.kernels.triton.launcher import run
from nsa_core.kernels.triton.score import score_kernel
from nsa_core.kernels.triton.sizes import cdiv, next_power_of_2
from nsa_core.kernels.triton.sources import LOG2E
from nsa_core.kernels.triton.topk import top_blocks_kernel, top_few_blocks_kernel

_SCORE_BYTES = 256 << 20  # the score buffer of one chunk; longer documents get shorter chunks
_HELD_BYTES = 64 << 10  # q tiles of a group that a score program holds on to
_TOP_TOKENS = 8  # tokens of one warp of the top-n
_FEW_BLOCKS = 64  # whose scores a program holds at once
_FEW_TOKENS, _FEW_WARPS = 16, 2  # of such a program


@dataclass(frozen=True)
class _Chunk:
    """Query blocks first_slot .. first_slot + slots, and the buffers of their scores."""

    first_slot: int
    slots: int
    scores: Tensor  # [G, chunk tokens, blocks]
    maxima: Tensor  # [G, chunk tokens, cells of `cell` blocks]
    cell: int


def select_blocks(
    q: Tensor, k: Tensor, lse: Tensor, docs: Documents,
    compress_block: int, compress_stride: int, num_selected: int,
) -> Tensor:  # fmt: skip
    """Ids [N, G, S] int32 of the chosen blocks, ascending, local to the document, -1 at the end.

    Args:
        q: Queries [N, H, D].
        k: Compressed keys [C, G, D].
        lse: Natural log normaliser of the compressed branch [N, H], -inf where nothing is visible.
        docs: Documents cut at the selection block size.
        compress_block: l in tokens.
        compress_stride: d in tokens.
        num_selected: n, forced blocks included.
    """
    groups = k.shape[1]
    ids = torch.empty(q.shape[0], groups, num_selected, dtype=torch.int32, device=q.device)
    launch = launch_for("score", q.device, q.shape[2], q.shape[2])
    keys = max(launch.keys, docs.block // compress_stride)
    cell = keys * compress_stride // docs.block
    num_blocks = cdiv(docs.max_seqlen, docs.block)
    chunk_slots = _SCORE_BYTES // (4 * groups * docs.block * num_blocks)
    chunk_slots = min(docs.num_slots, max(1, chunk_slots))
    rows = partial(torch.empty, groups, chunk_slots * docs.block, device=q.device)
    scores, maxima = rows(num_blocks), rows(cdiv(num_blocks, cell))
    for first_slot in range(0, docs.num_slots, chunk_slots):
        slots = min(chunk_slots, docs.num_slots - first_slot)
        chunk = _Chunk(first_slot, slots, scores, maxima, cell)
        _score(q, k, lse, docs, chunk, launch, (compress_block, compress_stride, num_selected))
        _take_top(ids, docs, chunk)
    return ids


def _score(
    q: Tensor, k: Tensor, lse: Tensor, docs: Documents, chunk: _Chunk, launch: Launch,
    blocks: tuple[int, int, int],
) -> None:  # fmt: skip
    groups, heads, width = k.shape[1], q.shape[1] // k.shape[1], q.shape[2]
    span, stride, num_selected = blocks
    hold = heads * docs.block * width * q.element_size() <= _HELD_BYTES
    run(
        score_kernel, (chunk.slots, groups),
        q, k, lse, chunk.scores, chunk.maxima, docs.tile_document, docs.cu_seqlens,
        chunk.first_slot, chunk.scores.shape[1], chunk.scores.shape[2], chunk.maxima.shape[2],
        LOG2E * width**-0.5, span, stride, docs.block, num_selected, groups, heads, width,
        chunk.cell * docs.block // stride, launch.stages, hold, **launch.options(),
    )  # fmt: skip


def _take_top(ids: Tensor, docs: Documents, chunk: _Chunk) -> None:
    """A token's position is at most its index in the pack, so early chunks need few cells."""
    groups, num_selected = ids.shape[1], ids.shape[2]
    num_blocks = chunk.scores.shape[2]
    reach = min(num_blocks, chunk.first_slot + chunk.slots)
    simulated = device_architecture(ids.device) == INTERPRETER
    places = max(16, next_power_of_2(num_selected))
    if reach <= _FEW_BLOCKS:
        tokens = docs.block if simulated else min(_FEW_TOKENS, docs.block)
        run(
            top_few_blocks_kernel, (chunk.slots * (docs.block // tokens), groups),
            chunk.scores, ids, docs.tile_document, docs.cu_seqlens,
            chunk.first_slot, chunk.scores.shape[1], num_blocks,
            docs.block, groups, num_selected, max(16, next_power_of_2(reach)), places,
            tokens, num_warps=_FEW_WARPS,
        )  # fmt: skip
        return
    tokens = docs.block if simulated else _TOP_TOKENS
    cells = next_power_of_2(cdiv(reach, chunk.cell))
    run(
        top_blocks_kernel, (chunk.slots * (docs.block // tokens), groups),
        chunk.scores, chunk.maxima, ids, docs.tile_document, docs.cu_seqlens,
        chunk.first_slot, chunk.scores.shape[1], num_blocks, chunk.maxima.shape[2],
        docs.block, groups, num_selected, chunk.cell, cells, places, tokens, num_warps=1,
    )  # fmt: skip
