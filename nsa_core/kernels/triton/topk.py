"""Top-n of the selection-block scores: forced blocks first, exact ties to the lowest index.

Blocks leave in the order (score descending, index ascending), so what is left of a row after a
choice is a function of the last choice alone, and nothing is marked. The score kernel leaves the
maximum of every cell of blocks; a choice looks at the maxima, then into one cell. A document of few
blocks needs none of that: all scores of a token fit the registers of a program.
"""

import triton
import triton.language as tl

from nsa_core.kernels.triton.document_slots import locate
from nsa_core.kernels.triton.rows import is_free

NONE = tl.constexpr(1 << 30)


@triton.jit
def given_blocks(column, current, CHOSEN: tl.constexpr):
    """Ids that a token has before anything is ranked; NONE and above are places left.

    All blocks that have started where they are no more than CHOSEN, else the forced ones, in the
    last three places.
    """
    forced = tl.where(column == CHOSEN - 1, 0, NONE + column)
    forced = tl.where(column == CHOSEN - 2, current - 1, forced)
    forced = tl.where(column == CHOSEN - 3, current, forced)
    started = tl.where(column <= current, column, NONE + column)
    return tl.where(current < CHOSEN, started, forced)


@triton.jit(do_not_specialize=["first_slot", "chunk_tokens", "num_blocks", "num_cells"])
def top_blocks_kernel(
    SCORE, CELL_MAX, IDS, DOCUMENT, CU, first_slot, chunk_tokens, num_blocks, num_cells,
    BLOCK: tl.constexpr, G: tl.constexpr, CHOSEN: tl.constexpr, CELL: tl.constexpr,
    CELLS: tl.constexpr, SLOTS: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Ids [N, G, CHOSEN] ascending, -1 at the end, for BT tokens of one query block and one group.

    CELLS cells of CELL blocks (powers of two) reach every token of the chunk; SLOTS >= CHOSEN is
    the power of two that holds the ids while they are sorted.
    """
    PARTS: tl.constexpr = BLOCK // BT
    pid = tl.program_id(0)
    g = tl.program_id(1)
    slot = pid // PARTS
    start, length, current = locate(DOCUMENT, CU, first_slot + slot, BLOCK)
    token = (pid % PARTS) * BT + tl.arange(0, BT)
    position = current * BLOCK + token
    inside = position < length
    if current * BLOCK + (pid % PARTS) * BT >= length:
        return
    column = tl.arange(0, SLOTS)
    ids = tl.zeros([BT, SLOTS], tl.int32) + given_blocks(column, current, CHOSEN)[None, :]
    if current >= CHOSEN:
        row = g.to(tl.int64) * chunk_tokens + slot * BLOCK + token
        cell_index = tl.arange(0, CELLS)
        made = inside[:, None] & (cell_index * CELL < current - 1)[None, :]
        cell_at = CELL_MAX + row[:, None] * num_cells + cell_index[None, :]
        maxima = tl.load(cell_at, mask=made, other=-1.0)
        last_score = tl.full([BT], float("inf"), tl.float32)
        last_block = tl.full([BT], -1, tl.int32)
        for n in range(CHOSEN - 3):
            best = tl.max(maxima, 1)
            cell = tl.min(tl.where(maxima == best[:, None], cell_index[None, :], CELLS - 1), 1)
            block = cell[:, None] * CELL + tl.arange(0, CELL)[None, :]
            held = inside[:, None] & (block < current - 1)
            score = tl.load(SCORE + row[:, None] * num_blocks + block, mask=held, other=-1.0)
            is_open = (best < last_score)[:, None] | (block > last_block[:, None])
            at = tl.min(tl.where((score == best[:, None]) & is_open, block, NONE), 1)
            found = (best >= 0.0) & (at < NONE)
            ids = tl.where((column == n)[None, :] & found[:, None], at[:, None], ids)
            is_later = (score == best[:, None]) & (block > at[:, None])
            is_left = (score < best[:, None]) | is_later
            rest = tl.max(tl.where(is_left, score, -1.0), 1)
            rest = tl.where(found, rest, -1.0)
            maxima = tl.where(cell_index[None, :] == cell[:, None], rest[:, None], maxima)
            last_score = tl.where(found, best, last_score)
            last_block = tl.where(found, at, last_block)
    rank = tl.sum((ids[:, None, :] < ids[:, :, None]).to(tl.int32), 2)
    target = IDS + ((start + position).to(tl.int64) * G + g) * CHOSEN
    held = inside[:, None] & (rank < CHOSEN)
    tl.store(target[:, None] + rank, tl.where(ids >= NONE, -1, ids), mask=held)


@triton.jit
def store_few_best(
    IDS, left, token, inside, current, g,
    G: tl.constexpr, CHOSEN: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Choose by the scores `left` [tokens, blocks], -1 where a block is not free, and store ids.

    The scores do not matter where `current` is below CHOSEN.
    """
    BT: tl.constexpr = left.shape[0]
    BLOCKS: tl.constexpr = left.shape[1]
    block = tl.arange(0, BLOCKS)
    is_given = (block <= current) & (~is_free(block, current) | (current < CHOSEN))
    chosen = tl.zeros([BT, BLOCKS], tl.int32) + is_given.to(tl.int32)[None, :]
    if current >= CHOSEN:
        # No score is negative, so its bits order like an integer, and a warp has one instruction
        # for the largest integer of all lanes. Those of -1 are negative.
        bits = left.to(tl.int32, bitcast=True)
        for _ in range(CHOSEN - 3):
            best = tl.max(bits, 1)
            first = tl.min(tl.where(bits == best[:, None], block[None, :], NONE), 1)
            is_next = (block[None, :] == first[:, None]) & (best >= 0)[:, None]
            chosen = tl.where(is_next, 1, chosen)
            bits = tl.where(is_next, -1, bits)
    target = IDS + (token.to(tl.int64) * G + g)[:, None] * CHOSEN
    ids = tl.zeros([BT, BLOCKS], tl.int32) + block[None, :]
    tl.store(target + tl.cumsum(chosen, 1) - 1, ids, mask=inside[:, None] & (chosen > 0))
    column = tl.arange(0, SLOTS)[None, :]
    is_empty = (column >= tl.sum(chosen, 1)[:, None]) & (column < CHOSEN)
    nothing = tl.full([BT, SLOTS], -1, tl.int32)
    tl.store(target + column, nothing, mask=inside[:, None] & is_empty)


@triton.jit(do_not_specialize=["first_slot", "chunk_tokens", "num_blocks"])
def top_few_blocks_kernel(
    SCORE, IDS, DOCUMENT, CU, first_slot, chunk_tokens, num_blocks,
    BLOCK: tl.constexpr, G: tl.constexpr, CHOSEN: tl.constexpr, BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """As `top_blocks_kernel`, where BLOCKS (a power of two) reach every token of the chunk."""
    PARTS: tl.constexpr = BLOCK // BT
    pid = tl.program_id(0)
    g = tl.program_id(1)
    slot = pid // PARTS
    start, length, current = locate(DOCUMENT, CU, first_slot + slot, BLOCK)
    token = (pid % PARTS) * BT + tl.arange(0, BT)
    position = current * BLOCK + token
    inside = position < length
    if current * BLOCK + (pid % PARTS) * BT >= length:
        return
    block = tl.arange(0, BLOCKS)
    left = tl.full([BT, BLOCKS], -1.0, tl.float32)
    if current >= CHOSEN:
        row = g.to(tl.int64) * chunk_tokens + slot * BLOCK + token
        made = inside[:, None] & (block < current - 1)[None, :]
        left = tl.load(SCORE + row[:, None] * num_blocks + block[None, :], mask=made, other=-1.0)
    store_few_best(IDS, left, start + position, inside, current, g, G, CHOSEN, SLOTS)
