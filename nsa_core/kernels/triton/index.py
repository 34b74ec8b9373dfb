"""Turn chosen ids around: bits per token, or for every KV block the queries that chose it.

Bits serve the masked-dense path. The inverted index serves the KV-major path: queries are cut into
chunks of whole query blocks; list (chunk, group, KV block) holds its queries in one flat array
(CSR by histogram, prefix sum and scatter), and long lists are cut into items of equal size so that
no program is much longer than another. Each query's own block, the one before it and block 0 are
dense bands, handled apart: they stay out of the lists, and `flags` says which of them a token
chose.
"""

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_core.kernels.triton.document_slots import Documents, locate
from nsa_core.kernels.triton.launcher import run
from nsa_core.kernels.triton.rows import is_free
from nsa_core.kernels.triton.sizes import cdiv, next_power_of_2

FIRST = tl.constexpr(1)  # flag: block 0 is chosen (and is neither of the two below)
PREVIOUS = tl.constexpr(2)  # flag: the block before the token's own
CURRENT = tl.constexpr(4)  # flag: the token's own block
COUNT_PASS = tl.constexpr(0)
ORDER_PASS = tl.constexpr(1)
SCATTER_PASS = tl.constexpr(2)
_SCAN_WIDTH = 4096  # lists that the scan takes at a time
_SCAN_WARPS = 16


@triton.jit
def _load_ids(IDS, token, inside, g, G: tl.constexpr, CHOSEN: tl.constexpr, SLOTS: tl.constexpr):
    """Ids [tokens, SLOTS] of one group and their addresses; -1 where there is none."""
    column = tl.arange(0, SLOTS)
    at = (token.to(tl.int64) * G + g)[:, None] * CHOSEN + column[None, :]
    ids = tl.load(IDS + at, mask=inside[:, None] & (column < CHOSEN)[None, :], other=-1)
    return ids, at


@triton.jit(do_not_specialize=["num_padded", "num_words"])
def block_bits_kernel(
    IDS, BITS, DOCUMENT, CU, num_padded, num_words,
    BLOCK: tl.constexpr, G: tl.constexpr, CHOSEN: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Set bit j % 32 of word j // 32 for every chosen block j: bits [G, words, padded]."""
    slot = tl.program_id(0)
    g = tl.program_id(1)
    start, length, block = locate(DOCUMENT, CU, slot, BLOCK)
    within = tl.arange(0, BLOCK)
    position = block * BLOCK + within
    ids, _ = _load_ids(IDS, start + position, position < length, g, G, CHOSEN, SLOTS)
    for w in range(num_words):
        bit = tl.where((ids >= 0) & (ids // 32 == w), 1 << (ids % 32), 0)
        word = num_padded.to(tl.int64) * (g * num_words + w)
        tl.store(BITS + word + slot * BLOCK + within, tl.sum(bit, 1))


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
    listed = is_free(ids, block)
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


@triton.jit(do_not_specialize=["num_lists", "item_queries"])
def scan_lists_kernel(
    COUNT, OFFSET, ITEM_OFFSET, num_lists, item_queries, WIDTH: tl.constexpr
):  # fmt: skip
    """Where each list and its items begin: both prefix sums of the counts, by one program."""
    entries = tl.zeros([1], tl.int32)
    items = tl.zeros([1], tl.int32)
    tl.store(OFFSET, 0)
    tl.store(ITEM_OFFSET, 0)
    for first in tl.range(0, num_lists, WIDTH, num_stages=1):
        key = first + tl.arange(0, WIDTH)
        inside = key < num_lists
        count = tl.load(COUNT + key, mask=inside, other=0)
        cut = (count + (item_queries - 1)) // item_queries
        tl.store(OFFSET + key + 1, entries + tl.cumsum(count, 0), mask=inside)
        tl.store(ITEM_OFFSET + key + 1, items + tl.cumsum(cut, 0), mask=inside)
        entries += tl.sum(count, 0)
        items += tl.sum(cut, 0)


@dataclass(frozen=True)
class IndexSize:
    """Sizes of an inverted index, bounds where the ids decide; all of them known on the host."""

    num_tokens: int
    groups: int
    num_selected: int
    num_slots: int
    chunk_slots: int
    item_queries: int

    @classmethod
    def of(
        cls, ids: Tensor, num_slots: int, block: int, chunk_tokens: int, item_queries: int
    ) -> Self:
        """For ids [N, G, S], in chunks of whole query blocks of about `chunk_tokens` tokens."""
        chunk_slots = max(1, min(num_slots, chunk_tokens // block))
        num_tokens, groups, num_selected = ids.shape
        return cls(num_tokens, groups, num_selected, num_slots, chunk_slots, item_queries)

    @property
    def num_chunks(self) -> int:
        """Chunks of query blocks."""
        chunks: int = cdiv(self.num_slots, self.chunk_slots)
        return chunks

    @property
    def num_lists(self) -> int:
        """One list for every chunk, group and KV block."""
        return self.num_chunks * self.groups * self.num_slots

    @property
    def num_entries(self) -> int:
        """Every id of every token."""
        return self.num_tokens * self.groups * self.num_selected

    @property
    def sections(self) -> tuple[int, ...]:
        """Words of offset, item_offset, item_list, entries and flags."""
        items = max_items(self.num_entries, self.num_lists, self.item_queries)
        ends = self.num_lists + 1
        return ends, ends, items, self.num_entries, self.groups * self.num_tokens


@dataclass(frozen=True)
class QueryIndex:
    """The inverted index; lists are numbered (chunk * G + group) * num_slots + KV slot."""

    size: IndexSize
    offset: Tensor  # [lists + 1] first entry of a list
    item_offset: Tensor  # [lists + 1] first item of a list
    item_list: Tensor  # [at most max_items] list of an item
    entries: Tensor  # [N * G * S] token * S + column of its id; lists end to end
    flags: Tensor  # [G, N] which bands a token chose

    @classmethod
    def over(cls, words: Tensor, size: IndexSize) -> Self:
        """Views of the parts in one int32 tensor of `index_words(size)` words."""
        parts, begin = [], 0
        for section in size.sections:
            parts.append(words.narrow(0, begin, section))
            begin += _aligned(section)
        return cls(size, *parts)


def _aligned(words: int) -> int:
    """Sections begin at multiples of 16 bytes, as the compiled kernels take for granted."""
    return cdiv(words, 4) * 4


def index_words(size: IndexSize) -> int:
    """Words of the tensor that holds an index."""
    return sum(_aligned(section) for section in size.sections)


def num_words(max_seqlen: int, block: int) -> int:
    """Words of 32 bits that hold a bit for every block of the longest document."""
    words: int = cdiv(cdiv(max_seqlen, block), 32)
    return words


def block_bits(ids: Tensor, docs: Documents) -> Tensor:
    """Bits [G, words, padded] int32 of ids [N, G, S] (unique per token, -1 for none)."""
    _, groups, num_selected = ids.shape
    words = num_words(docs.max_seqlen, docs.block)
    bits = torch.empty(groups, words, docs.num_padded, dtype=torch.int32, device=ids.device)
    slots = max(16, next_power_of_2(num_selected))
    run(
        block_bits_kernel, (docs.num_slots, groups),
        ids, bits, docs.tile_document, docs.cu_seqlens, docs.num_padded, words,
        docs.block, groups, num_selected, slots,
    )  # fmt: skip
    return bits


def max_items(entries: int, lists: int, item_queries: int) -> int:
    """Items of `lists` lists with `entries` entries together cannot be more than this."""
    return entries // item_queries + min(lists, entries)


def build_index(ids: Tensor, docs: Documents, size: IndexSize, *, deterministic: bool) -> Tensor:
    """Invert ids [N, G, S] on the device; nothing is read back.

    The order of a list is that of the atomics that counted it; `deterministic` sorts it by token,
    and leaves 0 in the words that no list takes: they are part of what an operator returns.

    Returns:
        The words of a `QueryIndex`.
    """
    make = torch.zeros if deterministic else torch.empty
    words = make(index_words(size), dtype=torch.int32, device=ids.device)
    index = QueryIndex.over(words, size)
    count = torch.zeros(size.num_lists, dtype=torch.int32, device=ids.device)
    rank = torch.empty_like(ids)
    slots = max(16, next_power_of_2(size.num_selected))

    def walk(one_pass: tl.constexpr) -> None:
        run(
            index_queries_kernel, (size.num_slots, size.groups),
            ids, count, rank, index.offset, index.entries, index.flags,
            docs.tile_document, docs.cu_seqlens, size.num_slots, size.chunk_slots, size.num_tokens,
            docs.block, size.groups, size.num_selected, slots, one_pass.value,
        )  # fmt: skip

    walk(ORDER_PASS if deterministic else COUNT_PASS)
    run(
        scan_lists_kernel, (1,),
        count, index.offset, index.item_offset, size.num_lists, size.item_queries,
        min(_SCAN_WIDTH, next_power_of_2(size.num_lists)), num_warps=_SCAN_WARPS,
    )  # fmt: skip
    if deterministic:
        order = torch.sort(rank.view(-1), stable=True).indices
        row, column = order // (size.groups * size.num_selected), order % size.num_selected
        index.entries.copy_(row * size.num_selected + column)
    else:
        walk(SCATTER_PASS)
    run(
        cut_items_kernel,
        (cdiv(size.num_lists, 128),),
        index.item_offset,
        index.item_list,
        size.num_lists,
        128,
    )
    return words
