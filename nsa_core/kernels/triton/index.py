"""Turn chosen ids around: bits per token, or for every KV block the queries that chose it.

Bits serve the masked-dense path. The inverted index serves the KV-major path: queries are cut into
chunks of whole query blocks; list (chunk, group, KV block) holds its queries in one flat array
(CSR by histogram, prefix sum and scatter), and long lists are cut into items of equal size so that
no program is much longer than another. Each query's own block, the one before it and block 0 are
dense bands, handled apart: they stay out of the lists, and `flags` says which of them a token
chose.
"""

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_core.kernels.triton.attention import Documents
from nsa_core.kernels.triton.tiles import locate

FIRST = tl.constexpr(1)  # flag: block 0 is chosen (and is neither of the two below)
PREVIOUS = tl.constexpr(2)  # flag: the block before the token's own
CURRENT = tl.constexpr(4)  # flag: the token's own block
COUNT_PASS = tl.constexpr(0)
ORDER_PASS = tl.constexpr(1)
SCATTER_PASS = tl.constexpr(2)


@triton.jit
def _load_ids(IDS, token, inside, g, G: tl.constexpr, CHOSEN: tl.constexpr, SLOTS: tl.constexpr):
    """Ids [tokens, SLOTS] of one group and their addresses; -1 where there is none."""
    column = tl.arange(0, SLOTS)
    at = (token.to(tl.int64) * G + g)[:, None] * CHOSEN + column[None, :]
    ids = tl.load(IDS + at, mask=inside[:, None] & (column < CHOSEN)[None, :], other=-1)
    return ids, at


@triton.jit(do_not_specialize=["num_tokens", "num_words"])
def block_bits_kernel(
    IDS, BITS, num_tokens, num_words,
    G: tl.constexpr, CHOSEN: tl.constexpr, SLOTS: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Set bit j % 32 of word j // 32 for every chosen block j: bits [G, words, N]."""
    g = tl.program_id(1)
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    inside = token < num_tokens
    ids, _ = _load_ids(IDS, token, inside, g, G, CHOSEN, SLOTS)
    for w in range(num_words):
        bit = tl.where((ids >= 0) & (ids // 32 == w), 1 << (ids % 32), 0)
        word = num_tokens.to(tl.int64) * (g * num_words + w)
        tl.store(BITS + word + token, tl.sum(bit, 1), mask=inside)


@triton.jit(do_not_specialize=["num_slots", "chunk_slots", "num_tokens"])
def index_queries_kernel(
    IDS, COUNT, RANK, OFFSET, LIST, FLAGS, DOCUMENT, CU, num_slots, chunk_slots, num_tokens,
    BLOCK: tl.constexpr, G: tl.constexpr, CHOSEN: tl.constexpr, SLOTS: tl.constexpr,
    PASS: tl.constexpr,
):  # fmt: skip
    """One walk over the ids of a query block.

    COUNT_PASS counts the queries of every list and notes each one's rank, in any order. ORDER_PASS
    counts, and notes the list instead of the rank. SCATTER_PASS writes the entries.
    """
    slot = tl.program_id(0)
    g = tl.program_id(1)
    start, length, block = locate(DOCUMENT, CU, slot, BLOCK)
    position = block * BLOCK + tl.arange(0, BLOCK)
    if block * BLOCK >= length:
        return
    inside = position < length
    token = start + position
    ids, at = _load_ids(IDS, token, inside, g, G, CHOSEN, SLOTS)
    listed = (ids > 0) & (ids < block - 1)
    key = ((slot // chunk_slots) * G + g) * num_slots + (slot - block) + ids
    if PASS == SCATTER_PASS:
        rank = tl.load(RANK + at, mask=listed, other=0)
        begin = tl.load(OFFSET + key, mask=listed, other=0)
        entry = token[:, None] * CHOSEN + tl.arange(0, SLOTS)[None, :]
        tl.store(LIST + begin + rank, entry, mask=listed)
    else:
        rank = tl.atomic_add(COUNT + key, 1, mask=listed, sem="relaxed")
        if PASS == COUNT_PASS:
            tl.store(RANK + at, rank, mask=listed)
        else:
            nowhere = tl.cdiv(num_slots, chunk_slots) * G * num_slots
            present = inside[:, None] & (tl.arange(0, SLOTS) < CHOSEN)[None, :]
            tl.store(RANK + at, tl.where(listed, key, nowhere), mask=present)
        own = tl.max(tl.where(ids == block, CURRENT, 0), 1)
        own += tl.max(tl.where((ids == block - 1) & (ids >= 0), PREVIOUS, 0), 1)
        own += tl.max(tl.where((ids == 0) & (block > 1), FIRST, 0), 1)
        tl.store(FLAGS + g.to(tl.int64) * num_tokens + token, own, mask=inside)


@triton.jit(do_not_specialize=["num_lists"])
def cut_items_kernel(ITEM_OFFSET, ITEM_LIST, num_lists, WIDTH: tl.constexpr):
    """Name the list of every item."""
    key = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = key < num_lists
    begin = tl.load(ITEM_OFFSET + key, mask=inside, other=0)
    count = tl.load(ITEM_OFFSET + key + 1, mask=inside, other=0) - begin
    most = tl.max(tl.where(inside, count, 0))
    for i in range(most):
        tl.store(ITEM_LIST + begin + i, key, mask=inside & (i < count))


@dataclass(frozen=True)
class QueryIndex:
    """The inverted index; lists are numbered (chunk * G + group) * num_slots + KV slot."""

    offset: Tensor  # [lists + 1] first entry of a list
    item_offset: Tensor  # [lists + 1] first item of a list
    item_list: Tensor  # [at most max_items] list of an item
    entries: Tensor  # [N * G * S] token * S + column of its id; lists end to end
    flags: Tensor  # [G, N] which bands a token chose
    chunk_slots: int


def block_bits(ids: Tensor, docs: Documents) -> Tensor:
    """Bits [G, words, N] int32 of ids [N, G, S] (unique per token, -1 for none)."""
    num_tokens, groups, num_selected = ids.shape
    words = triton.cdiv(triton.cdiv(docs.max_seqlen, docs.block), 32)
    bits = torch.empty(groups, words, num_tokens, dtype=torch.int32, device=ids.device)
    grid = (triton.cdiv(num_tokens, 128), groups)
    slots = max(16, triton.next_power_of_2(num_selected))
    block_bits_kernel[grid](ids, bits, num_tokens, words, groups, num_selected, slots, 128)
    return bits


def chunk_count(docs: Documents, chunk_slots: int) -> int:
    """Number of chunks of query blocks."""
    chunks: int = triton.cdiv(docs.num_slots, chunk_slots)
    return chunks


def max_items(entries: int, lists: int, item_queries: int) -> int:
    """Items of `lists` lists with `entries` entries together cannot be more than this."""
    return entries // item_queries + min(lists, entries)


def build_index(
    ids: Tensor, docs: Documents, chunk_tokens: int, item_queries: int, *, deterministic: bool
) -> QueryIndex:
    """Invert ids [N, G, S] on the device; sizes are bounds known on the host, nothing is read back.

    The order of a list is that of the atomics that counted it; `deterministic` sorts it by token.
    """
    num_tokens, groups, num_selected = ids.shape
    chunk_slots = max(1, min(docs.num_slots, chunk_tokens // docs.block))
    num_lists = chunk_count(docs, chunk_slots) * groups * docs.num_slots
    int32 = partial(torch.empty, dtype=torch.int32, device=ids.device)
    count = int32(num_lists).zero_()
    rank = torch.empty_like(ids)
    flags = int32(groups, num_tokens)
    entries = int32(ids.numel())
    offset, item_offset = int32(2, num_lists + 1).zero_().unbind()
    slots = max(16, triton.next_power_of_2(num_selected))

    def walk(one_pass: tl.constexpr) -> None:
        index_queries_kernel[docs.num_slots, groups](
            ids, count, rank, offset, entries, flags, docs.tile_document, docs.cu_seqlens,
            docs.num_slots, chunk_slots, num_tokens,
            docs.block, groups, num_selected, slots, one_pass.value,
        )  # fmt: skip

    walk(ORDER_PASS if deterministic else COUNT_PASS)
    torch.cumsum(count, 0, dtype=torch.int32, out=offset[1:])
    items = (count + (item_queries - 1)) // item_queries
    torch.cumsum(items, 0, dtype=torch.int32, out=item_offset[1:])
    if deterministic:
        order = torch.sort(rank.view(-1), stable=True).indices
        row, column = order // (groups * num_selected), order % num_selected
        entries.copy_(row * num_selected + column)
    else:
        walk(SCATTER_PASS)
    item_list = int32(max_items(ids.numel(), num_lists, item_queries))
    cut_items_kernel[(triton.cdiv(num_lists, 128),)](item_offset, item_list, num_lists, 128)
    return QueryIndex(offset, item_offset, item_list, entries, flags, chunk_slots)
