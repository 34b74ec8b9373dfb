"""Choose the selection blocks of every token, a chunk of tokens at a time."""

import torch
import triton
from torch import Tensor

from nsa_core.kernels.triton.attention import LOG2E, Documents
from nsa_core.kernels.triton.launch import INTERPRETER, device_architecture, launch_for
from nsa_core.kernels.triton.score import score_kernel
from nsa_core.kernels.triton.topk import top_blocks_kernel

_SCORE_BYTES = 128 << 20  # the score buffer of one chunk; longer documents get shorter chunks
_HELD_BYTES = 64 << 10  # q tiles of a group that a score program holds on to


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
    num_blocks = triton.cdiv(docs.max_seqlen, docs.block)
    row_bytes = 4 * groups * docs.block * num_blocks
    chunk_slots = min(docs.num_slots, max(1, _SCORE_BYTES // row_bytes))
    scores = torch.empty(
        groups, chunk_slots * docs.block, num_blocks, dtype=torch.float32, device=q.device
    )
    for first_slot in range(0, docs.num_slots, chunk_slots):
        slots = min(chunk_slots, docs.num_slots - first_slot)
        _score(q, k, lse, scores, docs, first_slot, slots, (compress_block, compress_stride))
        _take_top(scores, ids, docs, first_slot, slots)
    return ids


def _score(
    q: Tensor, k: Tensor, lse: Tensor, scores: Tensor, docs: Documents,
    first_slot: int, slots: int, compression: tuple[int, int],
) -> None:  # fmt: skip
    groups, heads, width = k.shape[1], q.shape[1] // k.shape[1], q.shape[2]
    launch = launch_for("score", q.device, width, width)
    span, stride = compression
    keys = max(launch.keys, docs.block // stride)
    hold = heads * docs.block * width * q.element_size() <= _HELD_BYTES
    score_kernel[(slots, groups)](
        q, k, lse, scores, docs.tile_document, docs.cu_seqlens,
        first_slot, scores.shape[1], scores.shape[2], width**-0.5 * LOG2E,
        span, stride, docs.block, groups, heads, width, keys, launch.stages, hold,
        **launch.options(),
    )  # fmt: skip


def _take_top(scores: Tensor, ids: Tensor, docs: Documents, first_slot: int, slots: int) -> None:
    """A token's position is at most its index in the pack, so early chunks need narrow rows."""
    groups, num_selected = ids.shape[1], ids.shape[2]
    reach = min(scores.shape[2], first_slot + slots)
    width = max(16, triton.next_power_of_2(reach))
    simulated = device_architecture(ids.device) == INTERPRETER
    tokens = docs.block if simulated else min(16, docs.block, max(1, 4096 // width))
    top_blocks_kernel[(slots * (docs.block // tokens), groups)](
        scores, ids, docs.tile_document, docs.cu_seqlens, first_slot, scores.shape[1],
        scores.shape[2], docs.block, groups, num_selected, width,
        max(16, triton.next_power_of_2(num_selected)), tokens, num_warps=4,
    )  # fmt: skip
