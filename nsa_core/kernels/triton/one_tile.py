"""Compressed attention and the choice in one kernel, where one tile holds a document's keys.

Then a row's softmax is finished before the next head begins, and what the heads of a group give to
the selection blocks stays in registers: queries are read once, and no score is written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_core.kernels.triton import launch as launch_table
from nsa_core.kernels.triton.document_slots import Documents, locate
from nsa_core.kernels.triton.launcher import run
from nsa_core.kernels.triton.rows import (
    COMPRESSED,
    LOWEST,
    finish_softmax,
    hide_scores,
    is_free,
    matmul,
    num_visible,
    restore_nan,
    tame_values,
)
from nsa_core.kernels.triton.score import spread_over_blocks
from nsa_core.kernels.triton.sizes import cdiv, next_power_of_2
from nsa_core.kernels.triton.sources import LOG2E
from nsa_core.kernels.triton.topk import store_few_best

#: Where it was compared with a kernel for each step; newer cards have the table of sm_90, too.
_MEASURED = (9, 0)
_PRODUCT_KEYS = 16  # the fewest of a product


@triton.jit
def _attend_and_choose(
    Q, K, V, OUT, LSE, IDS, start, length, block, g, qk_scale,
    SPAN: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, CHOSEN: tl.constexpr,
    G: tl.constexpr, HG: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BN: tl.constexpr, SLOTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One query block and group with a tile of BN keys, those of BN * STRIDE / BLOCK blocks."""
    PER_BLOCK: tl.constexpr = BLOCK // STRIDE
    token = tl.arange(0, BLOCK)
    position = block * BLOCK + token
    inside = position < length
    head_row = (start + block * BLOCK).to(tl.int64) * (G * HG) + g * HG
    kk = tl.arange(0, BN)
    dd = tl.arange(0, D)
    ee = tl.arange(0, E)
    held = (kk < num_visible(length - 1, COMPRESSED, SPAN, STRIDE))[:, None]
    key_row = (start // STRIDE).to(tl.int64) * G + g
    k = tl.load(K + key_row * D + kk[:, None] * (G * D) + dd[None, :], mask=held, other=0.0)
    v = tl.load(V + key_row * E + kk[:, None] * (G * E) + ee[None, :], mask=held, other=0.0)
    tamed = tame_values(v)
    seen = kk[None, :] < num_visible(position, COMPRESSED, SPAN, STRIDE)[:, None]
    given = tl.zeros([BLOCK, BN], tl.float32)
    for h in tl.range(0, HG, num_stages=STAGES):
        row = token * (G * HG) + h
        q_row = Q + head_row * D + row[:, None] * D + dd[None, :]
        q = tl.load(q_row, mask=inside[:, None], other=0.0)
        scores = hide_scores(matmul(q, tl.trans(k)), v, seen)
        peak = tl.maximum(tl.max(scores, 1) * qk_scale, LOWEST)
        prob = tl.exp2(scores * qk_scale - peak[:, None])
        divisor, lse = finish_softmax(peak, tl.sum(prob, 1))
        share = (1.0 / divisor)[:, None]
        out = restore_nan(matmul(prob.to(v.dtype), tamed) * share).to(OUT.dtype.element_ty)
        out_row = OUT + head_row * E + row[:, None] * E + ee[None, :]
        tl.store(out_row, out, mask=inside[:, None])
        tl.store(LSE + head_row + row, lse, mask=inside)
        given += prob * share
    left = tl.full([BLOCK, BN // PER_BLOCK], -1.0, tl.float32)
    if block >= CHOSEN:
        none = tl.zeros([BLOCK], tl.float32)
        own, _ = spread_over_blocks(given, none, BN // PER_BLOCK, PER_BLOCK, SPAN // STRIDE)
        left = tl.where(is_free(tl.arange(0, BN // PER_BLOCK), block)[None, :], own, -1.0)
    store_few_best(IDS, left, start + position, inside, block, g, G, CHOSEN, SLOTS)


@triton.jit
def one_tile_kernel(
    Q, K, V, OUT, LSE, IDS, DOCUMENT, CU, qk_scale,
    SPAN: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, CHOSEN: tl.constexpr,
    G: tl.constexpr, HG: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BN: tl.constexpr, LEAST: tl.constexpr, SLOTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Output, log normaliser and ids of one query block and group, longest rows first.

    BN keys and BN * STRIDE / BLOCK selection blocks (powers of two) hold those of any document;
    half of them hold those of the first half of the query blocks, where LEAST keys are fewer.
    """
    HALF: tl.constexpr = BN // 2
    slot = tl.num_programs(0) - 1 - tl.program_id(0)
    g = tl.program_id(1)
    start, length, block = locate(DOCUMENT, CU, slot, BLOCK)
    if block * BLOCK >= length:
        return
    if LEAST <= HALF:  # noqa: SIM102 - the compiler decides the first and leaves out the second
        if (block + 1) * BLOCK <= HALF * STRIDE:
            _attend_and_choose(
                Q, K, V, OUT, LSE, IDS, start, length, block, g, qk_scale,
                SPAN, STRIDE, BLOCK, CHOSEN, G, HG, D, E, HALF, SLOTS, STAGES,
            )  # fmt: skip
            return
    _attend_and_choose(
        Q, K, V, OUT, LSE, IDS, start, length, block, g, qk_scale,
        SPAN, STRIDE, BLOCK, CHOSEN, G, HG, D, E, BN, SLOTS, STAGES,
    )  # fmt: skip


def tile_keys(max_seqlen: int, block: int, stride: int) -> int:
    """Keys of the tile that holds those of the longest document, and all of its blocks."""
    return next_power_of_2(cdiv(max_seqlen, block)) * (block // stride)


def takes_one_tile(q: Tensor, v: Tensor, docs: Documents, stride: int) -> bool:
    """Whether the documents are so short that this kernel is the faster way."""
    if launch_table.device_architecture(q.device) not in {launch_table.INTERPRETER, 90}:
        return False
    if launch_table.device_capability(q.device) not in {None, _MEASURED}:  # a CPU has none
        return False
    policy = launch_table.policy_for(q.device, q.shape[2], v.shape[2])
    return tile_keys(docs.max_seqlen, docs.block, stride) <= policy.one_tile_keys


def attend_and_choose(
    q: Tensor, k: Tensor, v: Tensor, docs: Documents,
    compress_block: int, compress_stride: int, num_selected: int, into: tuple[Tensor, Tensor],
) -> Tensor:  # fmt: skip
    """As `attend_host.forward` and `select.select_blocks` one after the other."""
    groups = k.shape[1]
    ids = torch.empty(q.shape[0], groups, num_selected, dtype=torch.int32, device=q.device)
    launch = launch_table.launch_for("one_tile", q.device, q.shape[2], v.shape[2])
    keys = max(_PRODUCT_KEYS, tile_keys(docs.max_seqlen, docs.block, compress_stride))
    run(
        one_tile_kernel, (docs.num_slots, groups),
        q, k, v, *into, ids, docs.tile_document, docs.cu_seqlens, q.shape[2]**-0.5 * LOG2E,
        compress_block, compress_stride, docs.block, num_selected,
        groups, q.shape[1] // groups, q.shape[2], v.shape[2],
        keys, launch.keys, max(16, next_power_of_2(num_selected)), launch.stages,
        **launch.options(),
    )  # fmt: skip
    return ids
